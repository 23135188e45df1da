"""Each answer to a question about inputs has its plan; later calls are asked, and run the plan that fits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import ADAMW, mlp, sgd, vectors

PLANNED = {"solver": "none", "fallback": "raise"}


class Choosing(nn.Module):
    """Runs one of two bodies, as an input says."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = mlp(), mlp()

    def forward(self, x):
        if x.sum() > 0:
            return self.positive(x)
        return self.negative(x)


def signed(count: int):
    """Return batches whose sums are positive and negative by turns."""
    return [(x.abs() if index % 2 else -x.abs(), target) for index, (x, target) in enumerate(vectors(count))]


def test_a_whole_step_has_a_plan_for_each_answer():
    step = WholeStep(Choosing(), ADAMW, signed(1)[0]).run(signed(8)).step
    assert step.stats.cached_plans == 2
    assert step.stats.replans == 1


def test_an_own_loop_has_a_plan_for_each_answer():
    loop = OwnLoop(Choosing(), signed(1)[0][:1]).run(signed(8))
    assert loop.step.stats.cached_plans == 2
    loop.assert_served()


def test_an_inference_has_a_plan_for_each_answer():
    check_inference(Choosing(), [batch[:1] for batch in signed(8)], 1)


def test_a_branch_in_the_loss():
    def loss_fn(output, target):
        loss = F.cross_entropy(output, target)
        return loss * 2 if (target == 0).any() else loss

    batches = [(x, target + index % 2 if (target == 2).sum() == 0 else target) for index, (x, target) in
               enumerate(vectors(6))]  # fmt: skip
    batches += [(x, torch.ones_like(target)) for x, target in vectors(2)]
    step = WholeStep(mlp(), ADAMW, batches[0], loss_fn).run(batches).step
    assert step.stats.cached_plans == 2


def ignoring(outputs, target):
    """Average over the targets that are not to be ignored, as a mean of chosen ones."""
    chosen = target != -100
    return F.cross_entropy(outputs[chosen], target[chosen])


def test_masked_rows_of_several_counts():
    batches = vectors(6)
    for index, (_, target) in enumerate(batches):
        target[: index % 3] = -100
    step = WholeStep(mlp(), ADAMW, batches[0], ignoring).run(batches).step
    assert step.stats.cached_plans == 3
    assert step.stats.families == 1
    OwnLoop(mlp(), batches[0][:1], ADAMW, ignoring).run(batches)


class Contrasting(nn.Module):
    """The logits of SimCLR: similarities without those to oneself, the positive one first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        features = F.normalize(self.body(x), dim=1)
        labels = torch.arange(len(x) // 2).repeat(2)
        same = labels[None] == labels[:, None]
        own = torch.eye(len(x), dtype=torch.bool)
        similar = (features @ features.T)[~own].view(len(x), -1)
        same = same[~own].view(len(x), -1)
        positives, negatives = similar[same].view(len(x), -1), similar[~same].view(len(x), -1)
        return torch.cat([positives, negatives], 1) / 0.1


def test_masks_that_are_constants():
    batches = [(x, torch.zeros(4, dtype=torch.long)) for x, _ in vectors(3)]
    step = WholeStep(Contrasting(), ADAMW, batches[0]).run(batches).step
    assert step.stats.cached_plans == 1
    OwnLoop(Contrasting(), batches[0][:1], ADAMW).run(batches).assert_served()


class Routed(nn.Module):
    """Sends each row to the expert that an input names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x, expert):
        result = x.new_zeros(len(x), 3)
        for index, module in enumerate(self.experts):
            rows = torch.where(expert == index)[0]
            if len(rows):
                result.index_add_(0, rows, module(x[rows]))
        return result


def test_rows_are_sent_to_experts_that_an_input_names():
    batches = [
        (x, torch.tensor(expert), target)
        for (x, target), expert in zip(
            vectors(4), [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1], [1] * 4], strict=True
        )
    ]
    step = WholeStep(Routed(), ADAMW, batches[0]).run(batches).step
    assert step.stats.cached_plans == 2


def test_an_input_that_the_step_writes_is_asked_before():
    class Writing(Choosing):
        def forward(self, x):
            outputs = super().forward(x + 0)
            x.mul_(-1)
            return outputs

    step = WholeStep(Writing(), ADAMW, signed(1)[0]).run(signed(6)).step
    assert step.stats.cached_plans == 2


class Scaled(nn.Module):
    """Draws a number out of its input and decides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        mean = x.mean().item()
        return self.body(x) * mean if int(1e6 * mean) % 2 else self.body(x)


def test_answers_that_never_come_twice_make_no_more_plans_than_are_kept():
    batches = vectors(5)
    step = WholeStep(Scaled(), ADAMW, batches[0], cache_size_limit=3).run(batches).step
    assert step.stats.cached_plans == 3


class Checkpointed(nn.Module):
    """Asks within a checkpoint, whose recomputation asks again."""

    def __init__(self) -> None:
        super().__init__()
        self.choosing, self.head = Choosing(), nn.Linear(3, 3)

    def part(self, x):
        positive = x > 0
        return self.choosing(x) * positive.sum().item() + self.choosing(x)[positive.any(1)].sum()

    def forward(self, x):
        return self.head(checkpoint(self.part, x, use_reentrant=False))


def test_questions_in_a_checkpoint():
    step = WholeStep(Checkpointed(), ADAMW, signed(1)[0]).run(signed(4)).step
    assert step.stats.cached_plans == 2
    loop = OwnLoop(Checkpointed(), signed(1)[0][:1], ADAMW).run(signed(4))
    loop.assert_served()
    assert loop.step.report().plan.baseline is not None


def test_an_answer_is_planned_for_when_it_comes_again():
    loop = OwnLoop(Choosing(), signed(1)[0][:1], fallback="eager")
    kinds = []
    for batch in signed(6):
        loop.train(batch)
        kinds.append((loop.step.stats.cached_plans, loop.step.stats.eager_runs))
    assert kinds == [(1, 0), (1, 1), (1, 1), (2, 1), (2, 1), (2, 1)]


def test_answers_that_never_come_twice_run_in_eager():
    step = WholeStep(Scaled(), ADAMW, vectors(1)[0], fallback="eager")

    def run():
        for batch in vectors(24):
            assert_same(step.train_eager(batch), step.step(*batch), "loss")

    with pytest.warns(RuntimeWarning, match=r"keep changing: input 0 → mean is .*, and was "):
        run()
    step.compare()
    assert step.step.stats.cached_plans == 1
    assert step.step.stats.eager_runs == 23


def test_numbers_that_are_compared_have_a_plan_for_each_truth_value():
    class Compared(Choosing):
        def forward(self, x):
            total = x.sum().item()
            return (self.positive(x) if total > 0 else self.negative(x)) * total

    step = WholeStep(Compared(), ADAMW, signed(1)[0]).run(signed(6)).step
    assert step.stats.cached_plans == 2
    OwnLoop(Compared(), signed(1)[0][:1]).run(signed(6)).assert_served()


def test_why_it_is_planned_again_is_logged(caplog):
    caplog.set_level("INFO", "olla_fx")
    step = olla_fx.optimize(Choosing().eval(), signed(1)[0][:1], **PLANNED)
    step(signed(2)[1][0])
    assert "again: input 0 → sum → gt is True, and was False (run/test_answers.py" in caplog.text


def test_questions_in_micro_batches():
    example, *_ = batches = [(x.abs() + 0.1, target) for x, target in vectors(4)]
    batches[2] = (-batches[2][0], batches[2][1])
    torch.manual_seed(0)
    eager, planned = (Choosing() for _ in range(2))
    planned.load_state_dict(eager.state_dict())
    optimizers = sgd(eager.parameters()), sgd(planned.parameters())
    step = olla_fx.optimize(
        planned,
        example,
        loss_fn=F.cross_entropy,
        optimizer=optimizers[1],
        accumulation_steps=2,
        **PLANNED,
    )
    for x, target in batches * 2:
        optimizers[0].zero_grad()
        for part, of_part in zip(x.chunk(2), target.chunk(2), strict=True):
            (F.cross_entropy(eager(part), of_part) / 2).backward()
        optimizers[0].step()
        step(x, target)
        assert_same(eager.state_dict(), planned.state_dict(), "weights")
    assert step.stats.cached_plans == 2
    assert step.stats.counts.served > 0
    x, target = example
    with pytest.raises(CaptureError, match="True in the first micro-batch and False in number 2"):
        step(torch.cat([x[:2], -x[2:]]), target)
    assert_same(eager.state_dict(), planned.state_dict(), "weights after a refusal")


def test_copies_and_pickles_know_the_answers():
    batches = signed(4)
    step = olla_fx.optimize(Choosing().eval(), batches[1][:1], **PLANNED)
    for again in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert again.stats.cached_plans == 1
        for x, _ in batches:
            with torch.no_grad():
                assert_same(step._model(x), again(x), "answer")
        assert again.stats.cached_plans == 2
        assert again.stats.replans == 1


def test_the_report_follows_eager_with_the_same_answers():
    batches = signed(4)
    step = WholeStep(Choosing(), ADAMW, batches[0]).run(batches).step
    assert step.report().plan.baseline is not None


@pytest.mark.parametrize("lengths", [[4, 2], [3, 3]])
def test_lengths_as_a_list(lengths):
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x, lengths):
            parts = self.body(x).split(lengths.tolist())
            return torch.stack([part.mean(0) for part in parts])

    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(6, 6, generator=generator),
            torch.tensor(lengths if index % 2 else [5, 1]),
            torch.tensor([0, 1]),
        )
        for index in range(4)
    ]
    step = WholeStep(Split(), ADAMW, batches[0]).run(batches).step
    assert step.stats.cached_plans == 2


def test_a_compiled_model_that_chooses():
    model = Choosing()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        loop = CompiledLoop(model).run(signed(4))
    assert loop.planned_modules()
