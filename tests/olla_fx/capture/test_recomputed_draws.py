"""Random operators under a checkpoint draw again what they drew, and leave the generator as eager does."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from olla_fx import draws
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.options import Options
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import Written, sgd

KEEPS_ITS_STATE = functools.partial(checkpoint, use_reentrant=False)
DRAWS_ANEW = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
RUNS_TO_THE_END = functools.partial(checkpoint, use_reentrant=False, early_stop=False)


def saving_products(context, operator, *_, **__):
    saved = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SAVES_PRODUCTS = functools.partial(
    checkpoint,
    use_reentrant=False,
    context_fn=functools.partial(create_selective_checkpoint_contexts, saving_products),
)


def attention(x):
    q = x.view(2, 4, 1, -1)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.5).reshape(x.shape)


def in_place(x):
    return x * torch.empty_like(x).bernoulli_(0.5) + torch.zeros_like(x).normal_().t_().t_()


def several(x):
    return F.dropout(F.dropout(x, 0.3).relu(), 0.3) * torch.rand_like(x)


OPERATORS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of channels": lambda x: F.dropout1d(x, 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randn": lambda x: x * torch.randn(x.shape),
    "randperm": lambda x: x[torch.randperm(len(x))] * x,
    "randint": lambda x: x * torch.randint(5, (x.shape[1],)),
    "multinomial": lambda x: x[torch.multinomial(x.detach().abs().sum(1), 8, replacement=True)] * x,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True) * x,
    "attention": attention,
    "in place": in_place,
    "several": several,
}


class Recomputed(nn.Module):
    """Three layers under checkpoints, with some random operator, among other draws."""

    def __init__(self, draw, how=KEEPS_ITS_STATE):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.draw, self.how = draw, how

    def forward(self, x):
        for layer in self.layers:
            x = self.how(lambda x, layer=layer: self.draw(layer(x)).tanh() * x, F.dropout(x, 0.1))
        return x + torch.rand_like(x)


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 16, generator=generator), torch.randint(16, (8,), generator=generator))
        for _ in range(count)
    ]


def assert_same_as_eager(model):
    """Compare a loop that also draws between forward and backward, and a whole step, with eager."""
    (x, y), *_ = batches(1)

    def loop(called, _):
        loss = F.dropout(F.cross_entropy(called(x), y, reduction="none"), 0.2).sum()
        loss.backward()
        return loss.detach()

    own = OwnLoop(model, x)
    for _ in range(3):
        own.zero_grad()
        own.run_loop(loop)
    own.assert_served()
    assert own.step.plan.checkpointed_operators > 0
    WholeStep(model, sgd, (x, y)).run(batches(3))
    return own


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_draws_again_what_it_drew(operator):
    assert_same_as_eager(Recomputed(OPERATORS[operator]))


@pytest.mark.parametrize("how", [DRAWS_ANEW, RUNS_TO_THE_END, SAVES_PRODUCTS])
def test_a_kind_of_checkpoint(how):
    assert_same_as_eager(Recomputed(several, how))


def nested(function, x):
    return KEEPS_ITS_STATE(lambda x: F.dropout(KEEPS_ITS_STATE(function, F.dropout(x, 0.2)), 0.2), x)


def test_nested_checkpoints():
    assert_same_as_eager(Recomputed(several, nested))


def test_a_selective_checkpoint_saves_what_it_is_told():
    pair = assert_same_as_eager(Recomputed(several, SAVES_PRODUCTS))
    assert "addmm" not in pair.step.stats.graph_modules[1].code


def states_in(pair):
    return [node for phase in pair.step.stats.graph_modules for node in phase.graph.nodes
            if node.target is draws.random_state]  # fmt: skip


def test_one_state_is_kept_for_each_checkpoint_that_draws():
    pair = OwnLoop(Recomputed(several), batches(1)[0][0]).run(batches(3))
    assert len(states_in(pair)) == 3 + 1  # and that of the generator when backward begins


def test_no_state_is_kept_without_checkpoints():
    pair = OwnLoop(Recomputed(several, lambda function, x: function(x)), batches(1)[0][0]).run(batches(3))
    assert not states_in(pair)
    assert pair.step.plan.checkpointed_operators == 0


def test_results_are_kept_if_a_cuda_graph_is_asked_for():
    """No state can be read or set while a graph is captured."""
    model, options = Recomputed(several), Options(cuda_graph=True)
    step = StepRequest(
        model, batches(1)[0], Mode.TRAINING, F.cross_entropy, sgd(model.parameters()), options=options
    )
    targets = [node.target for node in capture(step).graph_module.graph.nodes]
    assert draws.random_state not in targets
    assert draws.set_random_state not in targets
    assert targets.count(torch.ops.aten.rand_like.default) == 3 + 1


def test_accumulated_micro_batches():
    x, y = batches(1)[0]
    model = Recomputed(several)
    pair = WholeStep(model, sgd, (x, y), accumulation_steps=2)
    torch.manual_seed(3)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(pair.eager(part), target) / 2).backward()
    expected = torch.get_rng_state()
    pair.optimizers[0].step()
    torch.manual_seed(3)
    pair.step(x, y)
    assert torch.equal(torch.get_rng_state(), expected)
    pair.compare()


class OwnGradient(torch.autograd.Function):
    """Enables gradients in its backward, which recomputes nothing for a checkpoint."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            return torch.autograd.grad(again.sin(), again, gradient)[0]


def recomputed(function):
    pair = OwnLoop(
        Written(lambda self, x: function(self.layer(x)), layer=nn.Linear(16, 16)), batches(1)[0][0]
    )
    return pair.run(batches(2)).step.plan.checkpointed_operators


def test_only_what_a_checkpoint_runs_again_counts_as_recomputed():
    assert recomputed(OwnGradient.apply) == 0
    assert recomputed(lambda x: KEEPS_ITS_STATE(lambda x: x.cos().sin().exp(), x)) == 3
    assert recomputed(lambda x: KEEPS_ITS_STATE(lambda x: OwnGradient.apply(x.cos()), x)) == 2
