"""The planner reaches the promised figures on real architectures."""

import ast
import os
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import olla_fx
from olla_fx import torch_compat
from olla_fx.models import build_model
from olla_solvers.place.search import compilation_seconds

MIB = 2**20


WITHOUT_WORKSPACES = {
    "resnet18": 29.8,
    "alexnet": 144.2,
    "vgg11": 392.2,
    "mobilenet_v2": 75.6,
    "vit_b_16": 116.8,
}


WITH_WORKSPACES = [
    pytest.param("resnet18", 39.5),
    pytest.param("alexnet", 146.0),
    pytest.param("mobilenet_v2", 77.5),
    pytest.param("vgg11", 394.0, marks=pytest.mark.slow),
    pytest.param("vit_b_16", 118.0, marks=pytest.mark.slow),
]


def plan_meta(name, batch_size):
    case = build_model(f"torchvision:{name}", batch_size=batch_size, device="meta")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    return olla_fx.plan(
        case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, solver="none", baseline=False
    )


@pytest.fixture(scope="module")
def compiled_search():
    """Compile the search of placements, for which a plan on a new machine waits some seconds at most."""
    compilation_seconds()


@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize("name", WITHOUT_WORKSPACES)
def test_planned_peak_at_batch_1(name):
    plan = plan_meta(name, 1)
    assert plan.peak_bytes <= WITHOUT_WORKSPACES[name] * MIB
    assert plan.buffer_bytes <= plan.peak_bytes * 1.01
    assert plan.is_optimal


@pytest.mark.parametrize("batch_size", [1, 32])
def test_resnet18_is_within_a_thousandth_of_its_bound(batch_size):
    plan = plan_meta("resnet18", batch_size)
    assert plan.peak_bytes <= plan.lower_bound_bytes * 1.001
    assert plan.lower_bound_bytes <= {1: 29.75, 32: 670.6}[batch_size] * MIB


@pytest.mark.parametrize(("name", "most_mib"), WITH_WORKSPACES)
def test_planned_peak_with_workspaces(name, most_mib):
    """One real step is recorded; the plan then holds what kernels ask for."""
    case = build_model(f"torchvision:{name}")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    step = olla_fx.optimize(
        case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, solver="none", fallback="raise"
    )
    step(*case.inputs)
    assert step.plan.peak_bytes <= most_mib * MIB
    assert step.plan.buffer_bytes <= step.plan.peak_bytes * 1.05
    step.poison()
    step(*case.inputs)
    assert step.stats.counts.outside == 0
    assert step.stats.counts.outputs == 1
    assert step.stats.binding == "buffer"


def test_a_torch_newer_than_tested_is_reported(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    with pytest.warns(RuntimeWarning, match=r"tested with torch up to 2\.13, this is 99\.1\.0"):
        torch_compat.warn_if_newer_than_tested()
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_compat.warn_if_newer_than_tested()


def test_public_names():
    assert {"optimize", "plan", "Plan", "PlannedModule", "CaptureError"} <= set(olla_fx.__all__)
    assert all(hasattr(olla_fx, name) for name in olla_fx.__all__)
    assert set(olla_fx.__all__) <= set(dir(olla_fx))
    with pytest.raises(AttributeError, match="'olla_fx' has no attribute 'optimise'"):
        olla_fx.optimise  # noqa: B018


def test_public_names_are_found_where_type_checkers_see_them():
    """They are imported late; a submodule of the same name would take their place once it is imported."""
    tree = ast.parse(Path(olla_fx.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for_type_checkers = {name.name: node.module for node in imports for name in node.names}
    assert {name: for_type_checkers.get(name) for name in olla_fx.__all__} == olla_fx._HOME_OF
    submodules = {module.name for module in pkgutil.iter_modules(olla_fx.__path__)}
    assert not submodules & set(olla_fx.__all__)


def test_importing_the_package_imports_no_torch():
    code = "import sys, olla_fx; olla_fx.OllaError; assert 'torch' not in sys.modules; olla_fx.Plan"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((".", "solvers"))}
    folder = Path(olla_fx.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=environment)
