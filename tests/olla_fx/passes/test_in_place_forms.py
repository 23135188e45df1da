"""Operators' in-place forms: the same bits as the functional form, in the memory of an argument."""

from operator import getitem

import pytest
import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.passes.in_place_forms import in_place_form, out_form, write_over
from tests.olla_fx.comparisons import same_bits

aten = torch.ops.aten


UNARY = [
    "relu", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "silu", "gelu", "mish", "sigmoid",
    "tanh", "softplus", "exp", "log1p", "sqrt", "rsqrt", "abs", "neg", "reciprocal", "erf", "sin", "square",
]  # fmt: skip
BACKWARD = {
    "threshold_backward": (0.1,), "sigmoid_backward": (), "tanh_backward": (), "silu_backward": (),
    "gelu_backward": (), "hardtanh_backward": (-1.0, 1.0), "hardsigmoid_backward": (),
    "leaky_relu_backward": (0.1, False),
}  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "atan2", "fmod", "hypot"]
LAYOUTS = {
    "dense": lambda tensor: tensor,
    "channels-last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.contiguous().transpose(1, 3),
}


def operators():
    """Each operator, its number of tensors, and its arguments made from them."""
    for name in UNARY:
        yield getattr(aten, name).default, 1, lambda x: (x,)
    for name, options in BACKWARD.items():
        yield getattr(aten, name).default, 2, lambda x, y, options=options: (x, y, *options)
    yield aten.elu_backward.default, 2, lambda x, y: (x, 1.0, 1.0, 1.0, False, y)
    for name in BINARY:
        packet = getattr(aten, name)
        yield getattr(packet, packet.overloads()[0]), 2, lambda x, y: (x, y)
    yield aten.addcmul.default, 3, lambda x, y, z: (x, y, z)
    yield aten.addcdiv.default, 3, lambda x, y, z: (x, y, z)
    yield aten.lerp.Tensor, 3, lambda x, y, z: (x, y, z)
    yield aten.pow.Tensor_Scalar, 1, lambda x: (x, 3)
    yield aten.clamp.default, 1, lambda x: (x, -0.5, 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_the_functional_form(layout, dtype):
    """Every operator, written over every argument that it can be written over."""
    written = 0
    for operator, count, arrange in operators():
        tensors = [LAYOUTS[layout](torch.randn(2, 3, 5, 21)).to(dtype) for _ in range(count)]
        expected = operator(*arrange(*tensors))
        for index in range(count):
            if not (out_form(operator) or (index == 0 and in_place_form(operator))):
                continue
            graph = fx.Graph()
            inputs = [graph.placeholder(f"x{index}") for index in range(count)]
            node = graph.call_function(operator, arrange(*inputs))
            graph.output(node)
            write_over(node, inputs[index])
            written_to = [tensor.clone() for tensor in tensors]
            result = fx.GraphModule(nn.Module(), graph)(*written_to)
            assert result.data_ptr() == written_to[index].data_ptr(), node.target
            assert result.stride() == expected.stride()
            assert same_bits(result, expected), node.target
            written += 1
    assert written > 60


NORMALISED = {
    "images": (2, 8, 5, 7), "rows": (30, 8), "signals": (3, 8, 9), "volumes": (2, 8, 3, 4, 5),
    "one row": (1, 8),
}  # fmt: skip


def normalisation(of_statistics):
    """BatchNorm in evaluation, with statistics and weights that were trained."""
    for affine in (True, False):
        norm = nn.BatchNorm1d(8, affine=affine)
        for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2.0)
        norm = norm.to(of_statistics).eval().requires_grad_(False)
        yield norm.weight, norm.bias, norm.running_mean, norm.running_var


@pytest.mark.parametrize("shape", NORMALISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_normalisation_over_its_input_has_the_same_bits(shape, dtype):
    """With statistics of the input's type, and with those that mixed precision keeps in 32 bits."""
    operator = aten._native_batch_norm_legit_no_training.default
    for of_statistics in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
        for parts in normalisation(of_statistics):
            x = torch.randn(NORMALISED[shape]).to(dtype)
            for layout in (torch.contiguous_format, torch.channels_last):
                if layout == torch.channels_last and x.dim() != 4:
                    continue
                x = x.to(memory_format=layout)
                expected = operator(x, *parts, 0.1, 1e-5)
                graph = fx.Graph()
                x_node, *names = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
                node = graph.call_function(operator, (x_node, *names, 0.1, 1e-5))
                node.meta["val"] = expected
                graph.output((graph.call_function(getitem, (node, 0)),))
                write_over(node, x_node)
                written_to = x.clone()
                (result,) = fx.GraphModule(nn.Module(), graph)(written_to, *parts)
                assert result.data_ptr() == written_to.data_ptr()
                assert result.stride() == expected[0].stride()
                assert same_bits(result, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dimension", [-1, 1, 0])
@pytest.mark.parametrize("shape", [(2, 3, 5, 21), (3, 4099), (1, 1)])
def test_softmaxes_over_their_arguments(shape, dimension, dtype):
    values, gradient = (torch.randn(2, *shape) * 3).to(dtype)
    values.view(-1)[0] = -torch.inf
    for forward in (aten._softmax, aten._log_softmax):
        backward = (
            aten._softmax_backward_data if forward is aten._softmax else aten._log_softmax_backward_data
        )
        if dimension >= len(shape):
            continue
        result = forward(values, dimension, False)
        over = values.clone()
        assert same_bits(out_form(forward.default)(over, dimension, False, out=over), result)
        expected = backward(gradient, result, dimension, dtype)
        form = out_form(backward.default)
        name = torch_compat.schema_of(form).arguments[-1].name
        for index in (0, 1):
            written = [gradient.clone(), result.clone()]
            form(*written, dimension, dtype, **{name: written[index]})
            assert same_bits(written[index], expected)
