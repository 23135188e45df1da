"""Losses over many classes in chunks: what is changed, where, and the same bits."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.costs.work import work_of
from olla_fx.dataflow import build_dataflow
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import LossChunks
from olla_fx.step_plan import Plan
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, captured_training, sgd, skip_without
from tests.olla_fx.passes.rewrites.languages import (
    CLASSES,
    FORMS,
    IGNORED,
    Language,
    WithLoss,
    changed,
    own_loop,
    sentences,
    whole_step,
)

pytestmark = pytest.mark.usefixtures("small_parts")


CHUNKED = {name: form for name, form in FORMS.items() if name != "weighted"} | {"bias": {"bias": True}}


def chunked(step):
    return [change for change in step.plan.changes if change.rewrite == "chunked_loss"]


@pytest.mark.parametrize("form", CHUNKED)
def test_whole_steps_in_chunks(form):
    batches = sentences(ignored=CHUNKED[form].get("ignore_index", IGNORED))
    pair = whole_step(Language(**CHUNKED[form]), batches, ADAMW, loss_chunks=8)
    (change,) = chunked(pair.step)
    assert change.same_bits
    assert change.extra_operations == 2 * 65 * CLASSES * 16
    plan = pair.step.plan
    assert "0.00427 GFLOP more" in plan.report()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).changes == plan.changes


@pytest.mark.parametrize("form", CHUNKED)
def test_a_loop_of_ones_own_in_chunks(form):
    batches = sentences(ignored=CHUNKED[form].get("ignore_index", IGNORED))
    pair = own_loop(WithLoss(Language(**CHUNKED[form])), batches, loss_chunks=8)
    (change,) = chunked(pair.step)
    assert change.same_bits
    assert change.extra_operations == 2 * 2 * 65 * CLASSES * 16


class Scored(nn.Module):
    """Returns what a loop can tell classes by, made of a loss."""

    def __init__(self):
        super().__init__()
        self.model = Language()

    def forward(self, given):
        loss = self.model(*given)
        return torch.stack((loss, 0.5 * loss))[None]


def test_what_dynamo_cuts_out_in_chunks():
    batches = [(torch.stack(batch), torch.zeros(1, dtype=torch.long)) for batch in sentences()]
    loop = CompiledLoop(Scored(), options={"loss_chunks": 8}).run(batches)
    loop.assert_served(1)
    (module,) = loop.planned_modules()
    (change,) = chunked(module)
    assert change.same_bits


@pytest.mark.parametrize("at_once", [True, False])
def test_extra_operations_are_those_of_the_graph(at_once):
    model, (batch, *_) = Language(bias=True), sentences()
    if at_once:
        captured = captured_training(model, batch, loss_fn=model.loss)
    else:
        captured = capture(StepRequest(WithLoss(model), batch, Mode.AUTOGRAD))
    probe = Probe(torch.device("cpu"), True, lambda question, ask: ask())
    wanted = Wanted(["chunked_loss"], probe, loss_chunks=LossChunks(8))
    whole, chunks = run_passes(captured), run_passes(captured, wanted)
    flops = [
        sum(work_of(node, captured.device).flops for node in build_dataflow(graph, captured.device).operators)
        for graph in (whole.graph_module, chunks.graph_module)
    ]
    (change,) = chunks.changes
    # A chunk of columns has one column more.
    extra = 2 * 65 * 16 * 8
    assert flops[1] - flops[0] == change.extra_operations + extra


def test_chunks_are_all_that_is_there_of_logits():
    batches = sentences(1, shape=(32, 64))
    logits_bytes = batches[0][0].numel() * CLASSES * 4
    for make in (whole_step, lambda model, *given, **options: own_loop(WithLoss(model), *given, **options)):
        step = make(Language(), batches, loss_chunks=8).step
        assert chunked(step)
        assert step.plan.peak_bytes < 0.6 * logits_bytes


@pytest.mark.parametrize("loss_chunks", [None, 8])
def test_losses_beside_recomputation(loss_chunks):
    """Much of the body is computed again, before or behind what writes over the loss's arrays."""

    class Deep(Language):
        def __init__(self):
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16)) for _ in range(2)]
            self.middle = nn.Sequential(*blocks)

    options = {"recompute": 100.0, "loss_chunks": loss_chunks}
    for pair in (
        whole_step(Deep(), sentences(shape=(8, 32)), **options),
        own_loop(WithLoss(Deep()), sentences(shape=(8, 32)), **options),
    ):
        assert pair.step.plan.recomputed.operators
        assert changed(pair.step) & {"chunked_loss", "loss_gradients"}


@pytest.mark.parametrize("part", ["head", "body"])
def test_frozen_parts(part):
    model = Language()
    for parameter in (
        model.head if part == "head" else nn.ModuleList([model.table, model.middle])
    ).parameters():
        parameter.requires_grad_(False)
    pair = whole_step(model, sentences(), loss_chunks=8)
    (change,) = chunked(pair.step)
    assert (change.extra_operations == 0) == (part == "head")


def test_micro_batches_clipping_and_a_divided_loss():
    class Divided(Language):
        def loss(self, logits, labels):
            given = logits.flatten(0, 1), labels.flatten()
            return F.cross_entropy(*given, reduction="sum") / (labels != IGNORED).sum()

    pair = whole_step(Divided(), sentences(), loss_chunks=8)
    assert chunked(pair.step)
    model, batches = Language(), sentences(shape=(6, 13))
    step = olla_fx.optimize(
        model, batches[0], loss_fn=model.loss, optimizer=sgd(model.parameters()), loss_chunks=2,
        accumulation_steps=2, clip_grad_norm=0.1,
    )  # fmt: skip
    assert chunked(step)


@pytest.mark.parametrize("upcast", [True, False])
def test_16_bits_in_chunks(upcast):
    """A log-softmax in 16 bits does not tell what was subtracted."""
    model = WithLoss(Language(upcast=upcast, bias=True).bfloat16())
    batches = sentences()
    if upcast:
        pair = own_loop(model, batches, loss_chunks=8)
        assert [change.same_bits for change in chunked(pair.step)] == [True]
        return
    pair = OwnLoop(model, batches[0], loss_chunks=8)
    (change,) = chunked(pair.step)
    assert not change.same_bits
    assert "last bits may differ" in pair.step.plan.report()

    def loop(called, model):
        loss = called(*batches[1])
        loss.backward()
        return loss.detach()

    def close(expected, given, name):
        torch.testing.assert_close(given, expected, rtol=0.02, atol=1e-3, msg=name)

    for _ in range(3):
        pair.zero_grad()
        pair.run_loop(loop, close)
    pair.assert_served()


@pytest.mark.parametrize("may_differ", [True, False])
def test_products_that_differ_in_chunks(may_differ):
    """Where kernels do not agree, the gradient of the weight is added up, or nothing is done."""
    model, (batch, *_) = Language(bias=True), sentences()
    probe = Probe(torch.device("cpu"), True, lambda question, ask: False)
    wanted = Wanted(["chunked_loss"], probe, loss_chunks=LossChunks(4, may_differ))
    changes = run_passes(captured_training(model, batch, loss_fn=model.loss), wanted).changes
    assert [change.same_bits for change in changes] == ([False] if may_differ else [])
    assert all(change.extra_operations == 0 for change in changes)


def test_autocast_in_chunks():
    """The layer is in 16 bits, its loss in 32."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    pair = own_loop(WithLoss(Language(tied=True)), sentences(), loss_chunks=8, context=autocast)
    assert [change.same_bits for change in chunked(pair.step)] == [True]


def test_logits_that_the_caller_gets_stay_whole():
    batches = sentences()
    assert not chunked(own_loop(WithLoss(Language(), returns_logits=True), batches, loss_chunks=8).step)
    assert not chunked(whole_step(Language(), batches, return_outputs=True, outputs=2, loss_chunks=8).step)


def test_a_target_that_is_no_class_is_eagers_error():
    model, batches = Language(), sentences()
    pair = whole_step(model, batches, loss_chunks=8)
    tokens, labels = batches[0]
    for call in (
        lambda: model.loss(model(tokens), labels + CLASSES),
        lambda: pair.step(tokens, labels + CLASSES),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            call()


def test_a_language_model_of_transformers():
    skip_without("transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=CLASSES, n_positions=64, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randint(CLASSES, (4, 32), generator=generator), torch.tensor(0)) for _ in range(3)]

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, tokens):
            return self.model(tokens, labels=tokens, num_items_in_batch=torch.tensor(100)).loss

    first = lambda loss, _: loss  # noqa: E731
    assert chunked(WholeStep(Loss(), ADAMW, batches[0], first, loss_chunks=8).run(batches).step)
    own = OwnLoop(Loss(), batches[0][:1], loss_fn=first, loss_chunks=8).run(batches)
    assert chunked(own.step)
