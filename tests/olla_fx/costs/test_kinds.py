"""Which operators count as one kind, which may run on their own, and on what numbers they do."""

import pytest
import torch

import olla_fx.operators  # noqa: F401 - defines operators that are asked for by name
from olla_fx.costs.kinds import Operands, can_be_measured, kind_of
from tests.olla_fx.costs.nodes import CPU, node_of

aten = torch.ops.aten


def floats(*shape):
    return torch.empty(shape)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def test_layouts_types_and_constants_make_a_kind():
    kinds = [
        kind_of(node)
        for node in (
            node_of(aten.sum.dim_IntList, floats(4, 6), [0]),
            node_of(aten.sum.dim_IntList, floats(4, 6), [1]),
            node_of(aten.sum.dim_IntList, floats(6, 4), [0]),
            node_of(aten.sum.dim_IntList, floats(6, 4).t(), [0]),
            node_of(aten.sum.dim_IntList, floats(4, 6).double(), [0]),
            node_of(aten.mean.dim, floats(4, 6), [0]),
        )
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(node_of(aten.sum.dim_IntList, floats(4, 6), [0])) == kinds[0]


def test_where_a_result_lies_makes_no_other_kind():
    assert kind_of(node_of(aten.relu.default, floats(4))) == kind_of(node_of(aten.relu_.default, floats(4)))
    own, given = (
        node_of(aten.add.Tensor, floats(4), floats(4)),
        node_of(aten.add.out, floats(4), floats(4), out=floats(4)),
    )
    assert kind_of(own) == kind_of(given)


def test_a_number_of_the_call_is_any_number():
    def added(alpha):
        node = node_of(aten.add_.Tensor, floats(4), floats(4), alpha=1)
        number = node.graph.placeholder("alpha")
        number.meta["val"] = alpha
        node.update_kwarg("alpha", number)
        return node

    assert kind_of(added(0.5)) == kind_of(added(0.25))
    assert kind_of(added(0.5)) != kind_of(node_of(aten.add_.Tensor, floats(4), floats(4), alpha=1))
    unknown = added(None)
    assert can_be_measured(unknown, CPU)
    assert Operands(CPU).of(unknown)[1] == {"alpha": -0.5}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (lambda: node_of(aten.mm.default, floats(4, 4), floats(4, 4)), True),
        (lambda: node_of(aten.add_.Tensor, integers(4), 1), True),
        (lambda: node_of(aten.embedding.default, floats(9, 4), integers(3)), True),
        # draws
        (lambda: node_of(aten.native_dropout.default, floats(4), 0.5, True), False),
        # nobody knows what its integers mean
        (lambda: node_of(aten.bitwise_left_shift.Tensor, integers(4), integers(4)), False),
        # raises for most numbers
        (lambda: node_of(aten.cholesky.default, floats(4, 4)), False),
        (lambda: node_of(aten.add.Tensor, floats(4).cfloat(), floats(4).cfloat()), False),
        # nothing of it is on the device
        (lambda: node_of(aten.relu.default, floats(0)), False),
    ],
)
def test_only_what_harms_nobody_is_measured(node, expected):
    assert can_be_measured(node(), CPU) == expected


def test_operators_of_others_are_not_run():
    @torch.library.custom_op("olla_fx_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    counted.register_fake(lambda x: x.clone())
    assert not can_be_measured(node_of(torch.ops.olla_fx_test.counted.default, floats(4)), CPU)


def test_attention_without_dropout_draws_nothing():
    def attention(rate):
        heads = floats(1, 2, 4, 8)
        return node_of(aten._scaled_dot_product_flash_attention.default, heads, heads, heads, rate)

    nodes = [attention(0.0), attention(0.5)]
    assert [can_be_measured(node, CPU) for node in nodes] == [True, False]


def test_numbers_have_the_layout_and_are_in_range():
    node = node_of(aten.embedding.default, floats(9, 4).t().contiguous().t(), integers(2, 3))
    (table, tokens), keywords = Operands(CPU).of(node)
    assert table.stride() == (1, 9)
    assert table.shape == (9, 4)
    assert 0 <= table.min() < table.max() < 1
    assert tokens.shape == (2, 3)
    assert 0 <= tokens.min() <= tokens.max() < 9
    assert keywords == {}


def test_what_is_expanded_lies_in_one_place():
    (expanded,), _ = Operands(CPU).of(node_of(aten.relu.default, floats(1, 4).expand(8, 4)))
    assert expanded.stride() == (0, 1)
    assert torch.equal(expanded[0], expanded[7])


def test_arguments_share_no_memory_but_those_given_twice():
    operands = Operands(CPU)
    (left, right), _ = operands.of(node_of(aten.mul.Tensor, floats(4), floats(4)))
    assert left.data_ptr() != right.data_ptr()
    node = node_of(aten.mul.Tensor, floats(4), floats(4))
    node.update_arg(1, node.args[0])
    (left, right), _ = operands.of(node)
    assert left is right


def test_what_was_written_is_drawn_anew():
    operands = Operands(CPU)
    (first,), _ = operands.of(node_of(aten.relu_.default, floats(100)))
    drawn = first.clone()
    first.fill_(0.0)
    (second,), _ = operands.of(node_of(aten.relu_.default, floats(100)))
    assert torch.equal(second, drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8])
def test_no_generator_of_the_callers_is_used(dtype):
    before = torch.get_rng_state()
    Operands(CPU).of(node_of(aten.clone.default, torch.empty(100_000, dtype=dtype)))
    assert torch.equal(torch.get_rng_state(), before)
