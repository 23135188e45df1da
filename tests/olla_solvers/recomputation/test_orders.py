from dataclasses import replace

from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.orders import early_order, grouped_order
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


def unrolled(times: int, layers: int) -> RecomputationProblem:
    """Layers over times; backward goes through all layers of a time, and adds to gradients of each."""
    operators, arrays = [], []

    def operator(name: str, size: int, reads: list[int]) -> int:
        """Add an operator with its result; both have the same number."""
        number = len(operators)
        operators.append(Operator(name))
        arrays.append((name, size, number, []))
        for array in reads:
            arrays[array][3].append(number)
        return number

    hidden = {}
    for time in range(times):
        for layer in range(layers):
            before = [hidden[each] for each in ((time - 1, layer), (time, layer - 1)) if each in hidden]
            hidden[time, layer] = operator(f"x{time}.{layer}", 10, before)
    forward = len(operators)
    upward, sums = {}, {}
    for time in reversed(range(times)):
        for layer in reversed(range(layers)):
            after = [upward[each] for each in ((time + 1, layer), (time, layer + 1)) if each in upward]
            upward[time, layer] = operator(f"g{time}.{layer}", 10, [hidden[time, layer], *after])
            added = [sums[layer]] if layer in sums else []
            sums[layer] = operator(f"w{time}.{layer}", 100, [upward[time, layer], *added])
    stated = Problem(tuple(operators), tuple(Array(*each[:3], tuple(each[3])) for each in arrays))
    makers = tuple((number,) if number < forward else () for number in range(len(arrays)))
    phases = tuple(int(number >= forward) for number in range(len(operators)))
    return RecomputationProblem(stated, stated.captured_order, (1.0,) * len(operators), makers, phases)


def test_one_layer_after_the_other_has_the_sum_of_one_weight_s_gradients_at_a_time():
    problem = unrolled(times=6, layers=3)
    order = grouped_order(problem)
    assert problem.problem.is_executable(order)
    names = [problem.problem.operators[each].name for each in order if problem.phases[each]]
    assert [name.partition(".")[2] for name in names] == ["2"] * 12 + ["1"] * 12 + ["0"] * 12
    assert plain_peak(problem, problem.order) == 570
    assert plain_peak(problem, order) == 380


def plain_peak(problem: RecomputationProblem, order: tuple[int, ...]) -> int:
    instance = prepare(replace(problem, order=order))
    return Evaluator(instance).evaluate(plain_states(instance)).peak_bytes


def test_layers_that_are_passed_once_need_no_groups():
    assert grouped_order(unrolled(times=1, layers=6)) is None


def test_grouped_orders_of_random_steps_are_executable():
    orders = 0
    for seed in range(2000):
        problem = random_step(seed, 14).problem
        order = grouped_order(problem)
        orders += order is not None
        assert order is None or problem.problem.is_executable(order)
    assert orders > 0
