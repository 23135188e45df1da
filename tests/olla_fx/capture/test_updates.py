"""Updates that are repeated in the graph are those that the optimizer's own code would have traced."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn, optim

from olla_fx import Options, torch_compat
from olla_fx.capture import tracing
from olla_fx.capture.optimizer import SUPPORTED, run_update
from olla_fx.torch_compat import pytree, storage_key
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import captured_training, vectors

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": optim.Adam,
    "adam-amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "adamw": optim.AdamW,
    "adamw-maximize": partial(optim.AdamW, maximize=True),
    "nadam": optim.NAdam,
    "nadam-decoupled": partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": optim.Adamax,
    "adagrad": partial(optim.Adagrad, lr_decay=0.1, weight_decay=0.1),
    "adadelta": optim.Adadelta,
    "rmsprop": optim.RMSprop,
    "rmsprop-centered": partial(optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "rprop": optim.Rprop,
}


def stack(depth=4, width=6):
    layers = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())
    ]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def described(captured):
    """Return everything of a graph that later stages read: operators, arguments, layouts, shared storages."""
    nodes = list(captured.graph_module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    storages: dict[int, int] = {}

    def value(leaf):
        if not isinstance(leaf, torch.Tensor):
            return type(leaf)
        storage = storages.setdefault(storage_key(leaf), len(storages))
        size_bytes = leaf.untyped_storage().nbytes()
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, storage, size_bytes

    return [
        (
            node.name,
            node.op,
            str(node.target),
            str(fx.map_arg((node.args, node.kwargs), lambda argument: position[argument])),
            [value(leaf) for leaf in pytree.tree_leaves(node.meta.get("val"))],
        )
        for node in nodes
    ]


@pytest.fixture
def repeated(monkeypatch):
    """Count repeated updates."""
    calls = []
    repeat = torch_compat.repeat_nodes
    monkeypatch.setattr(torch_compat, "repeat_nodes", lambda *given: (calls.append(given), repeat(*given)))
    return calls


def assert_as_traced(monkeypatch, capture):
    one = capture()
    monkeypatch.setattr(tracing, "trace_updates", run_update)
    for left, right in zip(described(one), described(capture()), strict=True):
        assert left == right


def test_every_supported_optimizer_is_tested():
    made = {type(make(stack().parameters())) for make in OPTIMIZERS.values()}
    assert made == set(SUPPORTED)


@pytest.mark.parametrize("has_state", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_graph_is_the_one_that_is_traced_in_full(name, has_state, repeated, monkeypatch):
    model = stack()
    optimizer = OPTIMIZERS[name](model.parameters())
    example = vectors(1)[0]
    if has_state:
        F.cross_entropy(model(example[0]), example[1]).backward()
        optimizer.step()
    assert_as_traced(monkeypatch, lambda: captured_training(model, example, lambda _: optimizer))
    # Rprop makes constants meanwhile, which are traced for each parameter.
    assert len(repeated) == (0 if name == "rprop" else 18 - 4)


@pytest.mark.parametrize("options", [{"clip_grad_value": 0.1}, {"accumulation_steps": 2}])
def test_micro_batches_and_clipped_gradients(options, repeated, monkeypatch):
    example, options = vectors(1)[0], Options(**options)
    assert_as_traced(monkeypatch, lambda: captured_training(stack(), example, optim.AdamW, options=options))
    assert repeated


def test_parameters_of_other_groups_are_of_other_kinds(repeated, monkeypatch):
    def two_groups(parameters):
        first, *others = parameters
        return optim.SGD([{"params": first}, {"params": others, "weight_decay": 0.1}], lr=0.1, momentum=0.9)

    assert_as_traced(monkeypatch, lambda: captured_training(stack(), vectors(1)[0], two_groups))
    assert len(repeated) == 18 - 5


def test_subclasses_are_traced_in_full(repeated):
    class Counting(optim.SGD):
        """May share state between parameters."""

    captured_training(stack(), vectors(1)[0], partial(Counting, lr=0.1, momentum=0.9))
    assert not repeated


class Other(torch.autograd.Function):
    """Has each of its arguments as the gradient of the other, in its memory."""

    @staticmethod
    def forward(context, one, other):
        context.save_for_backward(one, other)
        return (one * other).sum()

    @staticmethod
    def backward(context, gradient):
        return context.saved_tensors[::-1]


def test_a_gradient_in_the_memory_of_a_parameter_is_read_when_eager_reads_it(repeated, monkeypatch):
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(3) for _ in range(4))

        def forward(self, x):
            one, other, *others = self.weights
            return x.sum() + Other.apply(one, other) + sum((weight**2).sum() for weight in others)

    example = (torch.randn(3), torch.zeros(()))
    make = partial(optim.SGD, lr=0.1)
    assert_as_traced(
        monkeypatch, lambda: captured_training(Twins(), example, make, lambda out, target: out - target)
    )
    assert len(repeated) == 1


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "nadam"])
def test_steps_with_repeated_updates_equal_eager(name, repeated):
    pair = WholeStep(stack(), OPTIMIZERS[name], vectors(1)[0])
    pair.run(vectors(5))
    assert repeated
