"""Trainer of transformers trains a planned model as it trains the model, bit for bit."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

import olla_fx
from olla_fx import CaptureError, OptionError, PlannedModule
from olla_fx.integrations.hugging_face import OllaCallback
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.integrations.trainer import Trained, bert, counted_gpt2, gpt2, padded, texts, train

ACCUMULATION = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
CHECKPOINTS = {"gradient_checkpointing": True, "num_train_epochs": 4}


class Poisoning(transformers.TrainerCallback):
    """Overwrites the free buffers before every step."""

    def __init__(self, planned):
        self.planned, self.steps = planned, 0

    def on_step_begin(self, *args, **others):
        for module in self.planned():
            if not module.stats.is_busy:
                module.poison()
                self.steps += 1


def optimized(model, example) -> PlannedModule:
    model.config.use_cache = False
    return olla_fx.optimize(model, example, solver="none")


def assert_same_trainings(eager: Trained, planned: Trained) -> None:
    assert eager.history == planned.history
    assert_same_models(eager.model, planned.model)


def assert_planned(stats) -> None:
    assert stats.binding == "buffer"
    assert stats.counts.served > 0
    assert stats.counts.outside == 0, stats.outside_log


def train_with_callback(make, folder, callback, **arguments) -> Trained:
    poisoning = Poisoning(lambda: callback._calls.modules.values())
    trained = train(make, folder, callbacks=[callback, poisoning], **arguments)
    assert poisoning.steps > 0
    assert_planned(callback.stats)
    return trained


@pytest.mark.parametrize("make", [bert, gpt2])
def test_trainer_trains_a_planned_model(make, tmp_path):
    eager = train(make, tmp_path / "eager")
    modules = []

    def plan(model, example):
        modules.append(optimized(model, example))
        return modules[0]

    poisoning = Poisoning(lambda: modules)
    planned = train(make, tmp_path / "planned", plan, [poisoning])
    assert poisoning.steps > 0
    assert planned.trainer.model is modules[0]
    assert_same_trainings(eager, planned)
    assert_planned(modules[0].stats)
    assert modules[0].stats.eager_runs < 20  # of 12 steps and 6 evaluations, some of which are new kinds
    for name in ("label_names", "can_return_loss", "model_accepts_loss_kwargs", "_signature_columns"):
        assert getattr(planned.trainer, name) == getattr(eager.trainer, name), name

    saved = {side: tmp_path / side / "checkpoint-12" for side in ("eager", "planned")}
    weights = {side: load_file(folder / "model.safetensors") for side, folder in saved.items()}
    assert weights["eager"].keys() == weights["planned"].keys()
    assert_same(*weights.values(), "saved weights")
    configs = [json.loads((folder / "config.json").read_text()) for folder in saved.values()]
    assert configs[0] == configs[1]
    assert_same_models(type(planned.model).from_pretrained(saved["planned"]), planned.model)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (bert, {}),
        (gpt2, {**ACCUMULATION, "num_train_epochs": 4}),
        pytest.param(bert, {"bf16": True}, marks=pytest.mark.slow),
        (gpt2, {"label_smoothing_factor": 0.1}),
        pytest.param(bert, CHECKPOINTS, marks=pytest.mark.slow),
        (gpt2, {"load_best_model_at_end": True, "metric_for_best_model": "loss"}),
        (bert, {"longest": None, "train_sampling_strategy": "group_by_length", "num_train_epochs": 8}),
    ],
    ids=["plain", "accumulation", "bf16", "label smoothing", "checkpointing", "best model", "lengths"],
)
def test_the_callback_plans_a_model_in_its_place(make, arguments, tmp_path):
    eager = train(make, tmp_path / "eager", **arguments)
    callback = OllaCallback(solver="none")
    planned = train_with_callback(make, tmp_path / "planned", callback, **arguments)
    assert_same_trainings(eager, planned)
    assert type(planned.trainer.model) is type(eager.trainer.model)
    assert planned.model.state_dict().keys() == eager.model.state_dict().keys()
    if "longest" in arguments:  # the plans of all lengths keep one order
        assert callback.stats.families >= 1
    else:
        assert callback.plan.is_optimal
    assert not callback._calls.modules


@pytest.mark.parametrize("way", ["optimize", "callback"])
def test_the_number_of_items_in_a_batch(way, tmp_path):
    """It is counted over all batches of an update, and so comes with them, as a tensor."""
    seen = []

    def noting():
        model = counted_gpt2()
        model.register_forward_pre_hook(
            lambda _, args, named: seen.append(named.get("num_items_in_batch")), with_kwargs=True
        )
        return model

    eager = train(noting, tmp_path / "eager", **ACCUMULATION)
    assert {type(number) for number in seen} == {torch.Tensor}
    assert len({int(number) for number in seen}) > 3
    if way == "optimize":
        modules = []

        def plan(model, example):
            modules.append(olla_fx.optimize(model, example, solver="none"))
            return modules[0]

        planned = train(counted_gpt2, tmp_path / "planned", plan, **ACCUMULATION)
        assert planned.trainer.model_accepts_loss_kwargs
        stats = modules[0].stats
    else:
        callback = OllaCallback(solver="none")
        planned = train_with_callback(counted_gpt2, tmp_path / "planned", callback, **ACCUMULATION)
        stats = callback.stats
    assert_same_trainings(eager, planned)
    assert_planned(stats)
    assert stats.eager_runs < len(seen)


@pytest.mark.parametrize("way", ["optimize", pytest.param("callback", marks=pytest.mark.slow)])
def test_resuming(way, tmp_path):
    for epochs in (1, 2):
        arguments = {"num_train_epochs": epochs, "resume": epochs > 1, "lr_scheduler_type": "constant"}
        eager = train(bert, tmp_path / "eager", **arguments)
        if way == "optimize":
            planned = train(bert, tmp_path / "planned", optimized, **arguments)
        else:
            planned = train(bert, tmp_path / "planned", callbacks=[OllaCallback(solver="none")], **arguments)
        assert_same_trainings(eager, planned)


def test_a_compiled_model_and_the_callback(tmp_path):
    """Accelerate takes no backend but those it knows by name; the model may be compiled before."""
    with pytest.raises(ValueError, match="OLLA_FX"):
        train(bert, tmp_path / "refused", torch_compile_backend="olla_fx")

    def compiled(model, example):
        model.compile(backend="olla_fx", dynamic=False)
        return model

    before = len(olla_fx.compiled_reports())
    eager = train(bert, tmp_path / "eager")
    planned = train(bert, tmp_path / "planned", compiled)
    assert_same_trainings(eager, planned)
    assert len(olla_fx.compiled_reports()) > before
    with pytest.raises(CaptureError, match="is compiled"):
        train(bert, tmp_path / "both", compiled, [OllaCallback()])
    torch._dynamo.reset()


def test_training_again_after_an_error(tmp_path):
    """Trainer tells no callback of an error, so that the model is still planned when the next one comes."""

    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            raise KeyboardInterrupt

    models = []

    def kept(model, example):
        models.append(model)
        return model

    with pytest.raises(KeyboardInterrupt):
        train(bert, tmp_path / "failed", kept, [OllaCallback(), Failing()])
    again = OllaCallback()
    train(lambda: models[0], tmp_path / "again", callbacks=[again])
    assert_planned(again.stats)


def test_a_model_that_cannot_be_planned_runs_in_eager(tmp_path):
    def with_hook():
        model = bert()
        model.bert.register_forward_hook(lambda *_: None)
        return model

    eager = train(with_hook, tmp_path / "eager", num_train_epochs=1)
    callback = OllaCallback()
    with pytest.warns(RuntimeWarning, match="runs without a plan: module 'bert' has the hook"):
        planned = train(with_hook, tmp_path / "planned", callbacks=[callback], num_train_epochs=1)
    assert_same_trainings(eager, planned)
    assert callback.plan is callback.stats is None
    with pytest.raises(CaptureError, match="module 'bert' has the hook"):
        train(with_hook, tmp_path / "planned", callbacks=[OllaCallback(fallback="raise")])


def test_options_of_the_callback():
    with pytest.raises(OptionError, match="patience"):
        OllaCallback(patience=1)
    with pytest.raises(CaptureError, match="the loop is the library's"):
        OllaCallback(clip_grad_norm=1.0)


def test_a_cache_for_generating_is_named():
    model = gpt2()
    features = [{key: value for key, value in text.items() if key != "number"} for text in texts(2)]
    example = padded(model, features)
    with pytest.raises(CaptureError, match=r"DynamicCache.*config.use_cache = False"):
        olla_fx.optimize(model, example)
    model.config.use_cache = False
    step = olla_fx.optimize(model.eval(), example, solver="none")
    with torch.no_grad():
        prompt = example["input_ids"][:, :4]
        with pytest.warns(RuntimeWarning, match=r"DynamicCache.*use_cache=False"):
            again = step(input_ids=prompt, use_cache=True, past_key_values=transformers.DynamicCache())
        assert_same(model(input_ids=prompt).logits, again.logits, "logits")


def test_a_missing_library_is_named():
    code = """
import sys
from importlib import import_module
for library, module in (("transformers", "hugging_face"), ("lightning", "lightning")):
    sys.modules[library] = None
    try:
        import_module(f"olla_fx.integrations.{module}")
    except ImportError as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for library, line in zip(("transformers", "lightning"), ran.stdout.splitlines(), strict=True):
        assert line.startswith(f"MissingPackageError {library} cannot be imported")
        assert "pip install 'olla-fx[integrations]'" in line
