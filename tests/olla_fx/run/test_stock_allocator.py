"""Steps run with the stock allocator if the arena cannot be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


WITHOUT_COMPILER = """
import copy, warnings
import torch
import torch.nn.functional as F
import olla_fx
from tests.olla_fx.comparisons import assert_same, assert_same_models, assert_same_optimizers
from tests.olla_fx.helpers import mlp, vectors

torch.manual_seed(0)
eager = mlp()
model = copy.deepcopy(eager)
optimizers = [torch.optim.AdamW(half.parameters()) for half in (eager, model)]
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    step = olla_fx.optimize(
        model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizers[1], solver="none"
    )
    for x, y in vectors(4):
        optimizers[0].zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        optimizers[0].step()
        step.poison()
        assert_same(loss.detach(), step(x, y), "loss")
    inference = olla_fx.optimize(model.eval(), x, solver="none", fallback="raise")
    inference(x)
assert_same_models(eager, model)
assert_same_optimizers(*optimizers)
assert step.stats.binding == inference.stats.binding == "stock"
assert step.stats.counts.served == 0
assert "stock" in str(step.report())
print(len([warning for warning in warned if "allocator" in str(warning.message)]))
"""


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [({"OLLA_FX_DISABLE_ARENA": "1"}, 0), ({"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": "empty"}, 1)],
    ids=["disabled", "no compiler"],
)
def test_without_a_compiler_the_stock_allocator_serves(variables, warnings, tmp_path):
    if "TORCH_EXTENSIONS_DIR" in variables:
        variables = {**variables, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "solvers")])},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(warnings)
