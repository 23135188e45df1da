"""Native programs: each value is what the graph module computes, and is dropped where it is."""

import operator
import weakref

import pytest
import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.arena import native_module
from olla_fx.emit.program import native_functions
from tests.olla_fx.comparisons import assert_same

aten = torch.ops.aten


def program_of(graph, constants=None, begin_operator=None):
    """Return a graph as a module, and the function of its program."""
    module = fx.GraphModule(constants or {}, graph)
    (function,) = native_functions([module], module, native_module(), begin_operator)
    return module, function


def check(graph, *inputs, constants=None):
    """Compare a program's results with the graph module's."""
    module, function = program_of(graph, constants)
    assert_same(list(module(*inputs)), list(function(*inputs)), "results")
    return function


def written(write):
    """Return a graph that ``write`` makes of a call's name, and of the placeholder ``x``."""
    graph = fx.Graph()
    graph.output(tuple(write(graph.call_function, graph.placeholder("x"))))
    return graph


@pytest.mark.parametrize(
    "write",
    [
        lambda call, x: [call(aten.add.Tensor, (x, 2), {"alpha": 3})],
        lambda call, x: [call(aten.mul.Tensor, (x, True))],
        lambda call, x: [call(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})],
        lambda call, x: [call(aten._to_copy.default, (x,), {"dtype": torch.bfloat16})],
        lambda call, x: [call(aten.full.default, ([2, 3], 1.5), {"device": torch.device("cpu")})],
        lambda call, x: [call(aten.empty_like.default, (x,), {"layout": torch.strided}).args[0]],
        lambda call, x: [call(aten.cat.default, ([x, call(aten.neg.default, (x,))], 1))],
        lambda call, x: [call(aten.index.Tensor, (x, [None, call(aten.argmax.default, (x, 1))]))],
        lambda call, x: [call(aten.clamp.default, (x, -1))],
        lambda call, x: [call(aten.std.correction, (x, [0]), {"correction": 0.5})],
        lambda call, x: [call(aten.gelu.default, (x,), {"approximate": "tanh"})],
        lambda call, x: [call(aten.conj_physical.default, (call(aten.mul.Tensor, (x, 1j)),))],
    ],
    ids=range(12),
)
def test_arguments_of_every_kind(write):
    check(written(write), torch.randn(3, 3))


def test_arguments_that_are_numbers_of_the_step():
    graph = fx.Graph()
    x, rate, rows = graph.placeholder("x"), graph.placeholder("rate"), graph.get_attr("rows")
    less = graph.call_function(operator.neg, (graph.call_function(operator.mul, (rate, 2)),))
    scaled = graph.call_function(aten.add.Tensor, (x, x), {"alpha": less})
    shifted = graph.call_function(aten.mul.Tensor, (scaled, rate))  # a number where a tensor is expected
    viewed = graph.call_function(aten.view.default, (shifted, [rows, -1]))
    dropped = graph.call_function(aten.native_dropout.default, (viewed, graph.placeholder("p"), False))
    graph.output((viewed, graph.call_function(operator.getitem, (dropped, 0)), less))
    function = check(graph, torch.randn(6, 2), 0.3, 0, constants={"rows": 4})
    assert function.with_attributes({"rows": 3})(torch.randn(6, 2), 0.3, 0)[0].shape == (3, 4)


def test_several_results():
    def write(call, x):
        parts = call(aten.split.Tensor, (x, 2, 1))
        values = call(aten.topk.default, (x, 2))
        yield call(operator.getitem, (parts, -1))
        yield call(operator.getitem, (values, 1))
        yield call(operator.getitem, (call(aten.aminmax.default, (x,)), 0))
        yield call(operator.getitem, (call(divmod, (7, 2)), 1))
        yield "a word"
        yield call(operator.getitem, (x, (slice(1, 2), None)))

    check(written(write), torch.randn(3, 5))


def test_writing_in_place_and_to_nothing():
    def write(call, x):
        call(aten.add_.Tensor, (x, 1.0))
        call(aten._assert_async.msg, (call(aten.all.default, (x,)), "zeros"))
        yield x

    module, function = program_of(written(write))
    first, second = torch.ones(3), torch.ones(3)
    module(first)
    version = second._version
    function(second)
    assert_same(first, second, "input")
    assert second._version > version


def test_values_are_dropped_after_their_last_use():
    alive = []

    def look(_):
        alive.append(seen() is not None)
        return 0

    def see(value):
        nonlocal seen
        seen = weakref.ref(value.untyped_storage())
        return 0

    seen = None

    def write(call, x):
        doubled = call(aten.mul.Tensor, (x, 2))
        call(see, (doubled,))
        call(look, (x,))
        yield call(aten.neg.default, (doubled,))
        call(look, (x,))
        call(aten.neg.default, (x,))  # of no use

    _, function = program_of(written(write))
    function(torch.ones(3))
    assert alive == [True, False]


def test_operators_begin_at_their_timesteps():
    native = native_module()
    memory = native.Memory(1024, -1)
    arena = native.Arena(memory, 3, [(1, 0, 400, 64), (2, 0, 400, 512)])
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(native.begin_operator, (1,))
    first = graph.call_function(aten.neg.default, (x,))
    graph.call_function(native.begin_operator, (2,))
    graph.output((graph.call_function(aten.neg.default, (first,)),))
    _, function = program_of(graph, begin_operator=native.begin_operator)
    x = torch.randn(100)
    assert arena.enter(False)
    (result,) = function(x)
    assert arena.exit()
    assert result.data_ptr() == memory.address + 512
    assert_same(result, x, "result")
    assert arena.counters()[0] == 2


def test_an_operator_that_fails_is_named():
    function = program_of(written(lambda call, x: [call(aten.mm.default, (x, x))]))[1]
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        function(torch.ones(2, 3))
    assert raised.value.__notes__ == ["raised by mm_default in the planned step"]


def test_errors_of_python_are_its_own():
    def refuse(_):
        raise KeyError("no")

    function = program_of(written(lambda call, x: [call(refuse, (x,))]))[1]
    with pytest.raises(KeyError, match="no") as raised:
        function(torch.ones(2))
    assert raised.value.__notes__ == ["raised by refuse in the planned step"]


def test_warnings_of_operators_are_pythons():
    function = program_of(written(lambda call, x: [call(aten.arange.out, (3,), {"out": x})]))[1]
    with pytest.warns(UserWarning, match="resized"):
        function(torch.ones(2))


def test_modes_see_the_operators():
    seen = []

    class Mode(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    function = program_of(written(lambda call, x: [call(aten.neg.default, (x,))]))[1]
    x = torch.ones(2)
    with Mode():
        function(x)
    assert seen == [aten.neg.default]


def test_no_graph_is_made_for_autograd():
    function = program_of(written(lambda call, x: [call(aten.mul.Tensor, (x, x))]))[1]
    (result,) = function(nn.Parameter(torch.ones(2)))
    assert not result.requires_grad
