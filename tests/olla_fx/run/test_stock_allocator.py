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
from tests.olla_fx.helpers import assert_same, assert_same_models, assert_same_optimizers, mlp, vectors

torch.manual_seed(0)
one = mlp()
other = copy.deepcopy(one)
optimizers = [torch.optim.AdamW(each.parameters()) for each in (one, other)]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    step = olla_fx.optimize(
        other, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizers[1], solver="none"
    )
    for x, y in vectors(4):
        optimizers[0].zero_grad()
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        optimizers[0].step()
        step.poison()
        assert_same(loss.detach(), step(x, y), "loss")
    second = olla_fx.optimize(other.eval(), x, solver="none")
    second(x)
assert_same_models(one, other)
assert_same_optimizers(*optimizers)
assert stats(step).binding == "stock" and second.binding == "stock", stats(step).binding
assert stats(step).counts.served == 0
assert "stock" in str(step.report())
print(len([each for each in said if "allocator" in str(each.message)]))
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
