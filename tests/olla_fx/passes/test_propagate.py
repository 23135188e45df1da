"""Fake values that follow what passes do are those that running the rewritten graph gives."""

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.passes import run_passes
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_fx.torch_compat import pytree, storage_key
from tests.olla_fx.helpers import SmallNet, Written, images, skip_without


def recurrent():
    """The gates of a GRU are views of one tensor, by an operator whose schema says that they are none."""
    layer = nn.GRU(6, 5, batch_first=True)
    return Written(lambda self, x: self.layer(x)[0][:, -1], layer=layer), torch.randn(3, 4, 6)


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Written(lambda self, x: self.layer(x).mean(1), layer=layer), torch.randn(2, 5, 8)


def in_place():
    def forward(self, x):
        hidden = self.first(x)
        hidden += x
        hidden[:, :2].sigmoid_()
        gates = hidden.clone().chunk(2, 1)
        return torch.relu_(self.second(gates[0] * gates[1].tanh()))

    return Written(forward, first=nn.Linear(8, 8), second=nn.Linear(4, 5)), torch.randn(3, 8)


def checkpointed():
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)

    return Written(forward, body=SmallNet()), images(1)[0][0]


MODELS = {
    "convolutions": lambda: (SmallNet(), images(1)[0][0]),
    "recurrent": recurrent,
    "attention": attention,
    "in place": in_place,
    "checkpointed": checkpointed,
}


def described(graph):
    storages: dict[int, int] = {}
    return [
        (
            node.name,
            leaf.shape,
            leaf.stride(),
            leaf.storage_offset(),
            leaf.dtype,
            leaf.untyped_storage().nbytes(),
            storages.setdefault(storage_key(leaf), len(storages)),
        )
        for node in graph.nodes
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if node.op != "output" and isinstance(leaf, torch.Tensor)
    ]


def assert_followed(request):
    captured = capture(request)
    rewritten = run_passes(captured).graph_module
    followed = described(rewritten.graph)
    propagate_fake_tensors(rewritten, rewritten.graph, captured.inputs, captured.device)
    assert followed == described(rewritten.graph)


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.AUTOGRAD, Mode.INFERENCE])
@pytest.mark.parametrize("name", MODELS)
def test_values_follow_the_passes(name, mode):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    if mode is Mode.TRAINING:
        target = torch.randint(5, (len(x),))
        optimizer = optim.AdamW(model.parameters())
        assert_followed(StepRequest(model, (x, target), mode, nn.functional.cross_entropy, optimizer))
    else:
        assert_followed(StepRequest(model.train(mode is Mode.AUTOGRAD), (x,), mode))


@pytest.mark.parametrize("name", ["resnet18", pytest.param("densenet121", marks=pytest.mark.slow)])
def test_values_follow_the_passes_of_larger_models(name):
    skip_without("torchvision")
    from olla_fx.models.vision import import_torchvision

    model = getattr(import_torchvision().models, name)(num_classes=5)
    assert_followed(StepRequest(model, (torch.randn(2, 3, 32, 32),), Mode.AUTOGRAD))
