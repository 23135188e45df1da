from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.recomputation.orders import early_order
from olla_solvers.recomputation.problem import RecomputationProblem
from tests.olla_solvers.recomputation.steps import random_step


def test_early_orders_of_random_steps_are_executable():
    for seed in range(300):
        problem = random_step(seed, 14).problem
        assert problem.problem.is_executable(early_order(problem))


def test_what_reads_a_gradient_for_its_norm_comes_right_behind_it():
    # Two gradients, then their norms, what follows from these, and two updates.
    arrays = (
        Array("first gradient", 8, 0, (2, 5)),
        Array("second gradient", 8, 1, (3, 6)),
        Array("first norm", 1, 2, (4,)),
        Array("second norm", 1, 3, (4,)),
        Array("total", 1, 4, (5, 6)),
    )
    problem = RecomputationProblem(
        Problem(tuple(Operator(f"o{number}") for number in range(7)), arrays),
        tuple(range(7)),
        (1.0,) * 7,
        ((0,), (1,), (), (), ()),
        (1, 1, 1, 1, 1, 2, 2),
    )
    assert early_order(problem) == (0, 2, 1, 3, 4, 5, 6)
