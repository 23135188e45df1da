"""Models of transformers with masks: of ones, padded on the right and on the left, and without one."""

import inspect
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

from olla_fx.models import import_torchvision
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, skip_without

VOCABULARY, TEXTS, TOKENS = 50, 2, 6
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MASKS = {"none": None, "ones": slice(0, 0), "right": slice(4, None), "left": slice(0, 2)}


def make(name: str, kernels: str) -> nn.Module:
    skip_without("transformers")
    import_torchvision()
    import transformers as hf

    options = {**SMALL, "attn_implementation": kernels}
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        wide = {"max_position_embeddings": 16, "problem_type": "single_label_classification"}
        return hf.BertForSequenceClassification(hf.BertConfig(**narrow, **wide, **options))
    if name == "vit":
        image = {"image_size": 8, "patch_size": 4, "attn_implementation": kernels, "num_labels": 3}
        image["problem_type"] = "single_label_classification"
        return hf.ViTForImageClassification(hf.ViTConfig(**narrow, **image))
    options["use_cache"] = False
    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **options))
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**narrow, **options))
    options["decoder_start_token_id"] = 0
    if name == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **options)
        )
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16,
            max_target_positions=16, **sides, **options,
        )
    )  # fmt: skip


def example(name: str, mask: str) -> dict[str, Any]:
    """Return random inputs with a mask, by name."""
    tokens = torch.randint(1, VOCABULARY, (TEXTS, TOKENS))
    if name == "vit":
        return {"pixel_values": torch.randn(TEXTS, 3, 8, 8), "labels": torch.randint(3, (TEXTS,))}
    inputs = {"input_ids": tokens, "labels": torch.randint(2, (TEXTS,)) if name == "bert" else tokens}
    if name == "whisper":
        inputs["input_features"] = torch.randn(TEXTS, 8, 32)
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
    if MASKS[mask] is not None:
        visible = torch.ones(TEXTS, TOKENS, dtype=torch.long)
        visible[1, MASKS[mask]] = 0
        inputs["decoder_attention_mask" if name == "whisper" else "attention_mask"] = visible
    return inputs


class Named(nn.Module):
    """Hands inputs over by name."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True)))


class OwnLoopByName(OwnLoop):
    """A loop that calls a model with named inputs."""

    def train_by_name(self, inputs: dict[str, Any]) -> None:
        self.zero_grad()

        def loop(called, _):
            loss = called(**inputs).loss
            loss.backward()
            return loss.detach()

        self.run_loop(loop)
        self.update()


def whole_step(name: str, kernels: str, masks: list[str]) -> WholeStep:
    nothing = torch.zeros(())
    batches = [(*example(name, mask).values(), nothing) for mask in masks]
    model = Named(make(name, kernels), list(example(name, masks[0])))
    return WholeStep(model, ADAMW, batches[0], lambda outputs, _: outputs.loss).run(batches)


def own_loop(name: str, kernels: str, masks: list[str]) -> OwnLoopByName:
    model = make(name, kernels)
    batches = [example(name, mask) for mask in masks]
    names = list(inspect.signature(model.forward).parameters)
    last = max(names.index(key) for key in batches[0])
    loop = OwnLoopByName(model, tuple(batches[0].get(key) for key in names[: last + 1]), ADAMW)
    for batch in batches:
        loop.train_by_name(batch)
    loop.compare()
    loop.assert_served()
    return loop


def usually(*names: str) -> list[ParameterSet]:
    """Return all architectures, of which some are part of the usual tests."""
    architectures = ("bert", "gpt2", "llama", "t5", "whisper")
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in architectures]


@pytest.mark.parametrize("name", usually("bert"))
def test_masks_that_change_in_a_whole_step(name):
    step = whole_step(name, "sdpa", ["ones", "right", "left", "ones", "right"]).step
    assert step.stats.cached_plans == 2
    assert all(plan.executor.step.captured.questions for plan in step._plans.cache._plans)


@pytest.mark.parametrize("name", usually("whisper"))
def test_no_mask(name):
    assert whole_step(name, "sdpa", ["none"] * 3).step._plans.current.executor.step.captured.questions == ()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_masks_for_the_plain_kernels(name):
    whole_step(name, "eager", ["left"] * 3)


@pytest.mark.parametrize("name", usually("llama"))
def test_masks_that_change_in_an_own_loop(name):
    loop = own_loop(name, "sdpa", ["right", "ones", "left", "ones", "right"])
    assert loop.step.stats.cached_plans == 2


@pytest.mark.parametrize("run", [whole_step, own_loop])
def test_a_model_that_takes_no_mask(run):
    run("vit", "sdpa", ["none"] * 3)
