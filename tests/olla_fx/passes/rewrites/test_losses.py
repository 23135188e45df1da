"""Losses over many classes in parts: what is changed, where, and the same bits."""

import dataclasses
import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.costs.work import work_of
from olla_fx.dataflow import build_dataflow
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted, chunks_of_loss, loss_gradients
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import LossChunks
from olla_fx.step_plan import Plan
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, MOMENTUM, captured_training, sgd, skip_without

aten = torch.ops.aten

CLASSES = 2051
IGNORED = -100


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(loss_gradients, "LEAST_PART_BYTES", 4096)


class Language(nn.Module):
    """Predicts tokens; with labels it returns the loss."""

    def __init__(self, *, tied=False, bias=False, upcast=False, reduction="mean", **options):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.upcast, self.reduction, self.options = upcast, reduction, options

    def forward(self, tokens, labels=None):
        logits = self.head(torch.tanh(self.middle(self.table(tokens))))
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits, labels):
        logits = logits.float() if self.upcast else logits
        given = logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(*given, reduction=self.reduction, **self.options)
        return (loss * 0.5).sum() if self.reduction == "none" else loss


def sentences(count=3, shape=(5, 13), ignored=IGNORED):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        tokens = torch.randint(CLASSES, shape, generator=generator)
        labels = torch.randint(CLASSES, shape, generator=generator)
        batches.append((tokens, labels.masked_fill(labels % 5 == 0, ignored)))
    return batches


def changed(step):
    return {change.rewrite for change in step.plan.changes}


def whole_step(model, batches, optimizer=sgd, **options):
    return WholeStep(model, optimizer, batches[0], model.loss, **options).run(batches)


class WithLoss(nn.Module):
    """Returns the loss alone, as a loop of one's own wants it."""

    def __init__(self, model, returns_logits=False):
        super().__init__()
        self.model, self.returns_logits = model, returns_logits

    def forward(self, tokens, labels):
        if self.returns_logits:
            logits = self.model(tokens)
            return self.model.loss(logits, labels), logits
        return self.model(tokens, labels)


def own_loop(model, batches, **options):
    first = lambda answer, _: answer[0] if isinstance(answer, tuple) else answer  # noqa: E731
    batches = [(tokens, labels, labels) for tokens, labels in batches]
    with options.get("context", nullcontext)():
        pair = OwnLoop(model, batches[0][:2], loss_fn=first, **options)
    return pair.run(batches)


FORMS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "weighted": {"weight": torch.rand(CLASSES)},
    "ignored": {"ignore_index": 3},
    "tied": {"tied": True, "bias": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_over_log_probabilities(form):
    batches = sentences(ignored=FORMS[form].get("ignore_index", IGNORED))
    pair = whole_step(Language(**FORMS[form]), batches)
    assert "loss_gradients" in changed(pair.step)
    own_loop(WithLoss(Language(**FORMS[form])), batches)


@pytest.mark.parametrize("upcast", [True, False])
def test_gradients_over_log_probabilities_in_16_bits(upcast):
    pair = whole_step(Language(upcast=upcast).bfloat16(), sentences())
    assert "loss_gradients" in changed(pair.step)


def test_a_loop_that_gets_logits_and_goes_back_twice():
    model = WithLoss(Language(), returns_logits=True)
    batch = sentences(1)[0]
    pair = own_loop(model, sentences())
    assert "loss_gradients" in changed(pair.step)

    def twice(called, model):
        loss, logits = called(*batch)
        loss.backward(retain_graph=True)
        (2 * loss + logits.mean()).backward()
        return loss.detach()

    pair.zero_grad()
    pair.run_loop(twice)


def test_a_loss_needs_one_array_of_its_logits_size():
    """Without the rewrite, log-probabilities and a gradient of theirs are there at once."""
    batches = sentences(1, shape=(16, 64))
    logits_bytes = batches[0][0].numel() * CLASSES * 4
    peaks = []
    for rewrites in ("all", "none"):
        model = Language()
        peaks.append(WholeStep(model, sgd, batches[0], model.loss, rewrites=rewrites).step.plan.peak_bytes)
    assert peaks[0] < 1.3 * logits_bytes
    assert 2 * logits_bytes < peaks[1]


def test_log_probabilities_that_something_else_reads():
    class Both(Language):
        def loss(self, logits, labels):
            values = logits.flatten(0, 1).log_softmax(-1)
            return F.nll_loss(values, labels.flatten()) + (values.exp() * values).sum() * 0.01

    pair = whole_step(Both(), sentences(), MOMENTUM)
    assert "loss_gradients" not in changed(pair.step)


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


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(2, 70), st.integers(2, 200), st.integers(2, 9), st.integers(0, 2),
    st.sampled_from([IGNORED, 0, 1]),
)  # fmt: skip
def test_losses_and_log_probabilities(seed, rows, classes, count, reduction, ignored):
    """Losses, and gradients of logits in rows and in columns, for logits with infinities, too."""
    generator = torch.Generator().manual_seed(seed)
    # One element a product: its kernels have no choice.
    hidden = torch.randn(rows, 1, generator=generator)
    weight = torch.randn(1, classes, generator=generator) * 5
    weight[0, seed % classes] = (0.0, 1e30, -torch.inf)[seed % 3]
    target = torch.randint(classes, (rows,), generator=generator)
    target[0] = ignored
    above = torch.randn(rows, generator=generator) if reduction == 0 else torch.tensor(0.75)
    layer = chunks_of_loss.Layer(hidden, weight, None, target, above)
    sizes = chunks_of_loss.ChunkedLoss(
        rows, classes, 1, count, torch.float32, torch.float32, reduction, ignored,
        chunks_of_loss.Gradients(False, False, False),
    )  # fmt: skip
    whole = torch._log_softmax(hidden @ weight, 1, False)
    assert_equal(sizes.whole(run, layer)[0], sizes.forward(run, layer))
    gathered = chunks_of_loss._Gathered()
    columns = dataclasses.replace(sizes, wanted=chunks_of_loss.Gradients(False, True, False))
    for chunk in columns.row_chunks:
        columns._noted_log_softmax(run, layer, chunk, gathered)
    notes = [torch.cat(parts) for parts in (gathered.maxima, gathered.largest)]
    total = sizes.forward(run, layer).total
    spread = aten.nll_loss_backward(above, whole, target, None, reduction, ignored, total)
    gradient = torch._log_softmax_backward_data(spread, whole, 1, torch.float32)
    parts = [
        columns._gradient_of_columns(run, layer, chunk, notes, target == ignored, total)
        for chunk in columns.column_chunks
    ]
    assert_equal([gradient], [torch.cat(parts, 1)])


def run(target, *args, **kwargs):
    return target(*args, **kwargs)


def assert_equal(expected, given):
    for one, other in zip(expected, given, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
