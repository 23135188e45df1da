"""Results of fake operators lie in memory as those of kernels do, however their arguments lie."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from olla_fx import torch_compat
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import Written, sgd

BATCH, CHANNELS, SIZE = 5, 4, 6


def in_sequence(*dimensions):
    """Return a function that lets a tensor's dimensions lie in memory in some sequence."""
    back = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    return lambda tensor: tensor.permute(dimensions).contiguous().permute(back)


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": in_sequence(0, 2, 3, 1),
    "channels first": in_sequence(1, 0, 2, 3),
    "columns": in_sequence(0, 1, 3, 2),
    "backwards": in_sequence(3, 2, 1, 0),
    "with gaps": lambda tensor: torch.cat([tensor, tensor], 1)[:, ::2],
    "expanded": lambda tensor: tensor[:, :, :1, :1].expand(tensor.shape),
}


def over_channels(layer):
    return lambda x: layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def target_like(loss):
    return lambda x: loss(x, torch.ones_like(x), reduction="none")


NORMS = {
    "batch norm": nn.BatchNorm2d(CHANNELS),
    "batch norm at rest": nn.BatchNorm2d(CHANNELS).eval(),
    "batch norm without statistics": nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "group norm": nn.GroupNorm(2, CHANNELS),
    "instance norm": nn.InstanceNorm2d(CHANNELS, affine=True),
    "layer norm": over_channels(nn.LayerNorm(CHANNELS)),
    "layer norm of rows": nn.LayerNorm(SIZE),
    "RMS norm": over_channels(nn.RMSNorm(CHANNELS)),
}
ACTIVATIONS = {
    name: getattr(F, name)
    for name in (
        "celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "leaky_relu", "logsigmoid",
        "mish",
        "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softshrink", "tanh",
    )
}  # fmt: skip
ACTIVATIONS |= {
    "prelu": nn.PReLU(CHANNELS),
    "rrelu in training": lambda x: F.rrelu(x, training=True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "softmax": lambda x: x.softmax(1),
    "softmax of rows": lambda x: x.softmax(3),
    "log-softmax": lambda x: x.log_softmax(1),
    "dropout": lambda x: F.dropout(x, 0.3),
}
OTHERS = {
    "convolution": nn.Conv2d(CHANNELS, 6, 3, padding=1),
    "grouped convolution": nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
    "transposed convolution": nn.ConvTranspose2d(CHANNELS, 6, 2, stride=2),
    "linear layer": over_channels(nn.Linear(CHANNELS, 5)),
    "max-pooling": nn.MaxPool2d(2),
    "average pooling": nn.AvgPool2d(2),
    "adaptive pooling": nn.AdaptiveAvgPool2d(3),
    "larger": nn.Upsample(scale_factor=2),
    "larger, smooth": nn.Upsample(scale_factor=2, mode="bilinear"),
    "mirrored": nn.ReflectionPad2d(1),
    "replicated": nn.ReplicationPad2d(1),
    "circular": nn.CircularPad2d(1),
    "shuffled pixels": nn.PixelShuffle(2),
    "shuffled channels": nn.ChannelShuffle(2),
    "rolled": lambda x: x.roll(1, 2),
    "flipped": lambda x: x.flip(2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "mse_loss": target_like(F.mse_loss),
    "smooth_l1_loss": target_like(F.smooth_l1_loss),
    "huber_loss": target_like(F.huber_loss),
    "cross entropy": lambda x: F.cross_entropy(
        x, torch.zeros(BATCH, SIZE, SIZE, dtype=torch.long), reduction="none"
    ),
    "cumulated": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1)[0],
    "gathered": lambda x: x[:, torch.tensor([1, 0, 3])],
    "joined": lambda x: torch.cat([x, x * 2], 1),
}


class Comparing(TorchDispatchMode):
    """Runs every operator on fake tensors, too, and notes whose results lie otherwise in memory."""

    def __init__(self):
        super().__init__()
        self.fake_mode = torch_compat.new_fake_mode()
        self.different = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = args, kwargs or {}
        with self.fake_mode:
            fakes = pytree.tree_map_only(torch.Tensor, fake_of, given)
            expected = operator(*fakes[0], **fakes[1])
        results = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            for result, fake in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True):
                if isinstance(result, torch.Tensor) and strides(result) != strides(fake):
                    self.different[str(operator)] = strides(result), strides(fake)
        return results


def fake_of(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def strides(tensor):
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


@pytest.mark.parametrize("name", [*NORMS, *ACTIVATIONS, *OTHERS])
def test_results_lie_as_kernels_leave_them(name):
    layer = {**NORMS, **ACTIVATIONS, **OTHERS}[name]
    comparing = Comparing()
    for of_input, of_gradient in itertools.product(LAYOUTS.values(), LAYOUTS.values()):
        x = of_input(torch.randn(BATCH, CHANNELS, SIZE, SIZE)).detach().requires_grad_()
        with comparing:
            result = layer(x)
        gradient = torch.randn(result.shape)
        if gradient.dim() == 4:
            gradient = of_gradient(gradient)
        with comparing:
            result.backward(gradient)
    assert not comparing.different


def normalized_by_pixels(self, x):
    hidden = self.before(self.stem(x))
    return self.norm(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).mean((2, 3))


@pytest.mark.parametrize(
    "before", [nn.Softmax(1), nn.LogSoftmax(1), nn.GroupNorm(2, CHANNELS), nn.ELU(), nn.Hardswish()], ids=str
)
def test_gradients_behind_a_layer_norm_over_channels(before):
    torch.manual_seed(0)
    parts = {"stem": nn.Conv2d(3, CHANNELS, 1), "before": before, "norm": nn.LayerNorm(CHANNELS)}
    batches = [(torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(CHANNELS, (BATCH,))) for _ in range(3)]
    WholeStep(Written(normalized_by_pixels, **parts), sgd, batches[0]).run(batches)
    OwnLoop(Written(normalized_by_pixels, **parts), batches[0][:1]).run(batches).assert_served()
