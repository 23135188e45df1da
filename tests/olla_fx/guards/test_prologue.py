"""What a look at a model at every call must not miss, and what it must not take for a change."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from olla_fx.run.glances import ModulesGlance, Place, TensorsGlance


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def _modules_glance(model: nn.Module) -> ModulesGlance:
    modules = list(model.modules())
    return ModulesGlance(modules, [module.training for module in modules])


def _tensors_glance(model: nn.Sequential) -> TensorsGlance:
    places: list[Place] = [(model[0], "_parameters", "weight"), (model[0], "_parameters", "bias")]
    places += [(model[1], "_buffers", "running_mean"), (model[2][0], "_parameters", "weight")]
    glance = TensorsGlance(places)
    glance.remember()
    return glance


def _rename_child(model: nn.Sequential) -> None:
    model._modules["other"] = model._modules.pop("2")


_TREE_CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "child added": lambda model: model.append(nn.ReLU()),
    "child removed": lambda model: model[2].pop(1),
    "child replaced by an equal one": lambda model: model.__setitem__(0, nn.Linear(3, 3)),
    "child renamed": _rename_child,
}
_MODULE_CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    **_TREE_CHANGES,
    "inner module in eval": lambda model: model[2][1].eval(),
    "forward hook": lambda model: model[2][1].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda model: model[0].register_full_backward_hook(lambda *_: None),
}
_KIND_CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "removed": lambda model: setattr(model[0], "bias", None),
    "tied": lambda model: setattr(model[2][0], "weight", model[0].weight),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "other dtype in place": lambda model: model.double(),
    "other shape in place": lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3)),
    "other strides in place": lambda model: setattr(model[0].weight, "data", torch.zeros(3, 3).t()),
    "negation pending": lambda model: setattr(
        model[0].weight, "data", torch.zeros(3, 3, dtype=torch.cfloat).conj().imag
    ),
}


@pytest.mark.parametrize("change", _MODULE_CHANGES)
def test_changed_modules_show(change: str) -> None:
    model = _model()
    glance = _modules_glance(model)
    assert not glance.shows_change()
    _MODULE_CHANGES[change](model)
    assert glance.shows_change()
    assert glance.shows_other_children() == (change in _TREE_CHANGES)


@pytest.mark.parametrize("change", _KIND_CHANGES)
def test_changed_tensors_show(change: str) -> None:
    model = _model()
    glance = _tensors_glance(model)
    assert not glance.shows_change()
    _KIND_CHANGES[change](model)
    assert glance.shows_change()


def test_nothing_is_known_before_it_was_remembered() -> None:
    model = _model()
    assert TensorsGlance([(model[0], "_parameters", "weight")]).shows_change()
    assert TensorsGlance([]).shows_change()


def test_values_may_change() -> None:
    model = _model()
    glance = _tensors_glance(model)
    with torch.no_grad():
        model[0].weight.add_(1)
        model[0].weight.data = torch.ones(3, 3)
        model[1].running_mean.fill_(2)
    model[0].weight.grad = torch.ones(3, 3)
    assert not glance.shows_change()


@pytest.mark.parametrize("kind", ["gradient", "accumulated gradient"])
def test_hooks_of_tensors_show(kind: str) -> None:
    model = _model()
    glance = _tensors_glance(model)
    assert not glance.shows_hooks()
    if kind == "gradient":
        handle = model[2][0].weight.register_hook(lambda gradient: gradient)
    else:
        handle = model[2][0].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert not glance.shows_change()
    assert glance.shows_hooks()
    handle.remove()
    assert not glance.shows_hooks()


def test_no_tensor_is_kept_alive() -> None:
    model = _model()
    glance = _tensors_glance(model)
    assert not glance.shows_change()
    gone: list[bool] = []
    weakref.finalize(model[0].weight, gone.append, True)
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert gone


def test_hooks_that_were_there_show_nothing() -> None:
    model = _model()
    handle = model[0].register_forward_hook(lambda *_: None)
    glance = _modules_glance(model)
    assert not glance.shows_change()
    other = model[1].register_forward_hook(lambda *_: None)
    assert glance.shows_change()
    other.remove()
    assert not glance.shows_change()
    handle.remove()
    assert glance.shows_change()


def test_hooks_of_all_modules_show() -> None:
    model = _model()
    glance = _modules_glance(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert glance.shows_change()
    finally:
        handle.remove()
    assert not glance.shows_change()


def test_another_order_of_children_shows() -> None:
    model = _model()
    model._modules = OrderedDict(model._modules)
    glance = _modules_glance(model)
    model._modules.move_to_end("0")
    assert glance.shows_other_children()
