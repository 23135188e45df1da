"""Weight decay in place waits until somebody asks for it, with the workspace of its factor, too."""

import pytest

from olla_fx.recomputation.problem import _with_writes_late
from olla_solvers.problem import Array, ArrayKind, Operator, Problem


@pytest.mark.parametrize(("workspace_bytes", "is_late"), [(0, True), (128, True), (1 << 20, False)])
def test_small_writes_come_right_before_who_waits_for_them(workspace_bytes, is_late):
    operators = (Operator("decay", workspace_bytes), Operator("forward"), Operator("update"))
    gradient = Array("gradient", 1 << 20, 1, (2,))
    weight = Array("weight", 1 << 20, None, (0, 2), ArrayKind.STATIC)
    problem = Problem(operators, (gradient, weight), ((0, 2),))
    assert _with_writes_late(problem, [0, 1, 2]) == ([1, 0, 2] if is_late else [0, 1, 2])
