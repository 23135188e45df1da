"""The generated prologue misses no change, and takes nothing else for one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.capture.optimizer import initial_state
from olla_fx.guards import Mismatch, Prologue
from olla_fx.guards.exact import ExactComparison
from tests.olla_fx.helpers import captured_training, mlp, vectors


class Model(nn.Sequential):
    """Reads a global variable, and a number of its own."""

    def __init__(self) -> None:
        inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3), inner)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + SHIFT


SHIFT = 0.5


@pytest.fixture
def model() -> Model:
    return Model()


X = torch.randn(4, 3)


def _prologue(model: nn.Module, *, sure: bool = True) -> Prologue:
    captured = capture(StepRequest(model, (X,), Mode.AUTOGRAD))
    prologue = Prologue(captured, model, None, None, initial_state, differentiates=True)
    if sure:
        assert not isinstance(prologue.run([X]), Mismatch)
        assert prologue.check([X]) is not None
    return prologue


def _training(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer]
) -> tuple[Prologue, torch.optim.Optimizer]:
    optimizer = make(model.parameters())
    example = vectors(1)[0]
    loss_fn = nn.functional.cross_entropy
    captured = captured_training(model, example, lambda _: optimizer)
    prologue = Prologue(captured, model, loss_fn, optimizer, initial_state)
    for _ in range(2):
        values = prologue.run(example)
        assert isinstance(values, list)
        for parameter in model.parameters():
            for value in optimizer.state[parameter].values():
                value.add_(1)  # as a step would
    assert isinstance(prologue.run(example), list)
    assert prologue.check(example) is not None
    return prologue, optimizer


def _rename_child(model: Model) -> None:
    model._modules["other"] = model._modules.pop("2")


TREE_CHANGES: dict[str, Callable[[Model], object]] = {
    "child added": lambda model: model.append(nn.ReLU()),
    "child removed": lambda model: model[2].pop(1),
    "child replaced by an equal one": lambda model: model.__setitem__(0, nn.Linear(3, 3)),
    "child renamed": _rename_child,
}
CHANGES: dict[str, Callable[[Model], object]] = {
    **TREE_CHANGES,
    "inner module in eval": lambda model: model[2][1].eval(),
    "forward hook": lambda model: model[2][1].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda model: model[0].register_full_backward_hook(lambda *_: None),
    "number": lambda model: setattr(model, "scale", 3.0),
    "number of another type": lambda model: setattr(model, "scale", 2),
    "parameter removed": lambda model: setattr(model[0], "bias", None),
    "tied": lambda model: setattr(model[2][0], "weight", model[0].weight),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "other dtype in place": lambda model: model.double(),
    "other shape in place": lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3)),
    "other strides in place": lambda model: setattr(model[0].weight, "data", torch.zeros(3, 3).t()),
    "negation pending": lambda model: setattr(
        model[0].weight, "data", torch.zeros(3, 3, dtype=torch.cfloat).conj().imag
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_show(model: Model, change: str) -> None:
    prologue = _prologue(model)
    CHANGES[change](model)
    assert prologue.check([X]) is None
    assert isinstance(prologue.run([X]), Mismatch)
    if change in TREE_CHANGES:
        assert prologue.lost()


def test_a_parameter_replaced_by_one_of_its_kind_is_used(model: Model) -> None:
    prologue = _prologue(model)
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    values = prologue.run([X])
    assert any(value is model[0].weight for value in values)
    assert prologue.lost() is None


def test_values_may_change(model: Model) -> None:
    prologue = _prologue(model)
    with torch.no_grad():
        model[0].weight.add_(1)
        model[0].weight.data = torch.ones(3, 3)
        model[1].running_mean.fill_(2)
    model[0].weight.grad = torch.ones(3, 3)
    model.counter = 1
    assert prologue.check([X]) is not None


def test_no_tensor_is_kept_alive(model: Model) -> None:
    prologue = _prologue(model)
    gone: list[bool] = []
    weakref.finalize(model[0].weight, gone.append, True)
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert gone
    assert isinstance(prologue.run([X]), list)


def test_hooks_that_were_there_show_nothing(model: Model) -> None:
    model[0] = torch.nn.utils.weight_norm(model[0])
    prologue = _prologue(model)
    other = model[1].register_forward_hook(lambda *_: None)
    assert prologue.check([X]) is None
    other.remove()
    assert prologue.check([X]) is not None
    torch.nn.utils.remove_weight_norm(model[0])
    assert prologue.check([X]) is None


def test_hooks_of_all_modules_show(model: Model) -> None:
    prologue = _prologue(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert prologue.check([X]) is None
    finally:
        handle.remove()
    assert prologue.check([X]) is not None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "switched", [lambda: _default_dtype(torch.float64), lambda: torch.device("meta")], ids=["dtype", "device"]
)
def test_settings_that_a_graph_bakes_show(
    model: Model, switched: Callable[[], AbstractContextManager[object]]
) -> None:
    prologue = _prologue(model)
    with switched():
        assert prologue.check([X]) is None
        mismatch = prologue.run([X])
        assert isinstance(mismatch, Mismatch)
        assert "default dtype" in mismatch.reason
    assert prologue.check([X]) is not None


def test_another_order_of_children_shows(model: Model) -> None:
    model._modules = OrderedDict(model._modules)
    prologue = _prologue(model)
    model._modules.move_to_end("0")
    assert prologue.check([X]) is None
    assert prologue.lost()


def test_nothing_is_known_before_the_exact_comparison(model: Model) -> None:
    prologue = _prologue(model, sure=False)
    assert prologue.check([X]) is None
    assert prologue.source == ""


def test_the_source_can_be_read(model: Model) -> None:
    source = _prologue(model).source
    assert "# '2.1'" in source
    assert "d['scale'] is not" in source
    compile(source, "<test>", "exec")


@pytest.fixture
def shift() -> Iterator[None]:
    yield
    globals()["SHIFT"] = 0.5


@pytest.mark.usefixtures("shift")
def test_global_variables_of_a_forward_are_guarded(model: Model) -> None:
    prologue = _prologue(model)
    globals()["SHIFT"] = float("0.5")
    assert prologue.check([X]) is not None
    globals()["SHIFT"] = 0.25
    assert prologue.check([X]) is None
    mismatch = prologue.run([X])
    assert isinstance(mismatch, Mismatch)
    assert mismatch.reason == "what Model.forward reads: SHIFT changed"


OPTIMIZER_CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "hook": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "number becomes 0": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.0),
    "flag": lambda _, optimizer: optimizer.param_groups[0].update(maximize=True),
    "group": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "parameter removed": lambda _, optimizer: optimizer.param_groups[0]["params"].pop(),
    "state of another dtype": lambda model, optimizer: optimizer.state[model[0].weight].update(
        exp_avg=torch.ones(8, 6, dtype=torch.float64)
    ),
    "gradient hook": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient),
    "accumulation hook": lambda model, _: model[0].weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("change", OPTIMIZER_CHANGES)
def test_changes_of_an_optimizer_show(change: str) -> None:
    model = mlp()
    prologue, optimizer = _training(model, torch.optim.Adam)
    OPTIMIZER_CHANGES[change](model, optimizer)
    assert prologue.check(vectors(1)[0]) is None
    assert isinstance(prologue.run(vectors(1)[0]), Mismatch)


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)])
def test_numbers_of_an_optimizer_are_read_at_every_call(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = mlp()
    prologue, optimizer = _training(model, make)
    optimizer.param_groups[0]["lr"] = 0.5
    values = prologue.check(vectors(1)[0])
    assert values is not None
    assert 0.5 in [value for value in values if isinstance(value, float)]
    fast = [id(value) for value in values if isinstance(value, torch.Tensor)]
    slow = [id(value) for value in prologue.gather(vectors(1)[0]) if isinstance(value, torch.Tensor)]
    assert fast[:-2] == slow[:-2]


def test_a_state_that_lasts_is_compared_twice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prologue = _prologue(model)
    assert prologue.changes() == ()
    comparisons: list[None] = []
    exact = ExactComparison.changes
    monkeypatch.setattr(ExactComparison, "changes", lambda self: comparisons.append(None) or exact(self))
    hook = model.register_forward_hook(lambda *_: None)
    hooked = [prologue.changes() for _ in range(5)]
    assert hooked == [hooked[0]] * 5
    assert "the hooks of module" in hooked[0][0][0]
    assert len(comparisons) == 2
    assert prologue.run([X]) == Mismatch(hooked[0][0][0])

    model.scale = 3.0
    assert [reason for reason, _ in prologue.changes()] == [hooked[0][0][0], "scale changed"]
    assert prologue.changed_numbers(lambda _: True) is None
    hook.remove()
    assert [reason for reason, _ in prologue.changes()] == ["scale changed"]
    assert [slot.name for slot in prologue.changed_numbers(lambda _: True) or ()] == ["scale"]
    model.scale = 2.0
    assert prologue.changes() == ()
    assert prologue.check([X]) is not None


def test_a_state_that_lasts_beside_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    prologue, _ = _training(model, torch.optim.AdamW)
    model.register_forward_hook(lambda *_: None)
    before = prologue.changes()
    assert prologue.changes() == before
    monkeypatch.setattr(ExactComparison, "changes", None)
    assert prologue.changes() == before
