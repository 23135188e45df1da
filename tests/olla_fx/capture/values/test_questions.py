"""Python may ask for values that follow from the inputs; the example answers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import olla_fx
from olla_fx import CaptureError
from olla_fx.capture import CapturedStep, Mode, StepRequest, capture
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import check_inference
from tests.olla_fx.helpers import Written, sgd

X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])


def captured(forward: Callable[..., object], *inputs: torch.Tensor) -> CapturedStep:
    return capture(StepRequest(Written(forward).eval(), inputs or (X,), Mode.INFERENCE))


def heard(step: CapturedStep) -> list[tuple[str, object]]:
    return [(question.recipe.words, question.answer) for question in step.questions]


def test_a_question_is_kept_once():
    step = captured(lambda self, x: x.exp() if (x > 0).all() and not (x > 0).all() else x.sin())
    assert heard(step) == [("input 0 → gt → all", False)]


def test_questions_come_in_the_order_in_which_python_asked():
    def forward(self, x, lengths):
        if lengths.max() > 2 and x.sum() > 0:
            return x[:, : int(lengths.min())].exp()
        return x.sin()

    step = captured(forward, X, torch.tensor([3, 2]))
    assert heard(step) == [
        ("input 1 → max → gt", True),
        ("input 0 → sum → gt", True),
        ("input 1 → min", 2),
    ]
    assert heard(captured(forward, X, torch.tensor([1, 2]))) == [("input 1 → max → gt", False)]


def test_numbers_that_are_only_calculated_with_are_no_questions():
    step = captured(lambda self, x, lengths: x / lengths.sum().item(), X, torch.tensor([3, 2]))
    assert step.questions == ()


COMPARED = {
    "gt 4": lambda n: n > 4,
    "lt 4": lambda n: 4 > n,
    "le 5": lambda n: n <= 5,
    "ge 4.5": lambda n: float(n) >= 4.5 if isinstance(n, int) else n >= 4.5,
    "eq 5": lambda n: n == 5,
    "ne 0": lambda n: bool(n),
}


@pytest.mark.parametrize("words", COMPARED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_number_that_is_compared_with_a_constant_is_asked_for_that(words, dtype):
    def forward(self, x, lengths):
        number = lengths.sum().item()
        return x.exp() * number if COMPARED[words](number) else x.sin() * number

    if (words, dtype) in (("ge 4.5", torch.int64), ("ne 0", torch.float32)):
        pytest.skip("becomes another number first")
    for total in (5, 3, 0):
        step = captured(forward, X, torch.tensor([total, 0], dtype=dtype))
        ((said, answer),) = heard(step)
        assert said.replace(".0", "") == f"input 1 → sum → {words}"
        assert answer == COMPARED[words](total)


def test_a_number_that_decides_otherwise_is_asked_for():
    def forward(self, x, lengths):
        return x.exp() if lengths.sum().item() % 2 else x.sin()

    assert heard(captured(forward, X, torch.tensor([3, 2]))) == [("input 1 → sum", 5)]
    sized = captured(lambda self, x, lengths: x[:, : lengths.min().item()].exp(), X, torch.tensor([3, 2]))
    assert heard(sized) == [("input 1 → min", 2)]


def test_numbers_that_python_makes_tensors_of_are_constants():
    step = captured(lambda self, x: x.exp() if (x > torch.tensor([0.5, 1.0, 2.0])).any() else x.sin())
    assert heard(step) == [("input 0 → gt → any", True)]


def test_lists_are_one_question():
    step = captured(lambda self, x, lengths: x.split(lengths.tolist(), 1)[0].exp(), X, torch.tensor([1, 2]))
    assert heard(step) == [("input 1", [1, 2])]
    step = captured(lambda self, x: x.exp() if (x > 0).tolist()[0][1] else x.sin())
    assert heard(step) == [("input 0 → gt", (X > 0).tolist())]


def test_inputs_can_be_compared():
    step = captured(lambda self, x, y: x.exp() if torch.equal(x, y) else x + y, X, X.clone())
    assert heard(step) == [("input 0 → equal", True)]


def test_the_example_is_not_changed():
    before = X.clone()

    def forward(self, x):
        first = x.sum() > 0
        x[0].mul_(-1)
        return x.exp() if first else x.sin()

    example = X.clone()
    captured(forward, example)
    assert_same(before, example, "example")


def written_before(self, x):
    x[0].mul_(-1)
    return x.exp() if x.sum() > 0 else x.sin()


def written_by_a_view(self, x):
    view = x.view(6)
    copy = view.view(3, 2)
    x.add_(1)
    return x.exp() if copy.sum() > 0 else x.sin()


def written_in_memory_shared_by_detach(self, x):
    x.detach().zero_()
    return x.exp() if x.sum() > 0 else x.sin()


@pytest.mark.parametrize("forward", [written_before, written_by_a_view, written_in_memory_shared_by_detach])
def test_inputs_that_were_written_to_cannot_be_asked(forward):
    with pytest.raises(CaptureError, match="not on its inputs alone"):
        captured(forward, X.clone())


def test_what_was_made_before_a_write_can_be_asked():
    def forward(self, x):
        more = x + 1
        x.zero_()
        return x.exp() if more.sum() > 0 else x.sin()

    assert heard(captured(forward, X.clone())) == [("input 0 → add → sum → gt", True)]


ASKS_OTHERS = {
    "weights": lambda self, x: x.exp() if self.weight.sum() > 0 else x.sin(),
    "weights and inputs": lambda self, x: x.exp() if (self.weight * x).sum() > 0 else x.sin(),
    "a mask of weights": lambda self, x: x[self.weight * x > 0].exp(),
    "a number of weights": lambda self, x: x.exp() if self.weight.sum().item() > 0 else x.sin(),
    "a size of weights": lambda self, x: x[: int((self.weight > 0).sum())].exp(),
    "random": lambda self, x: x.exp() if torch.rand_like(x).sum() > 0 else x.sin(),
}


@pytest.mark.parametrize("name", ASKS_OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_questions_about_anything_else_are_refused_without_symbols(name):
    model = Written(ASKS_OTHERS[name], weight=nn.Parameter(torch.ones(3))).eval()
    with pytest.raises(CaptureError, match=r"not on its inputs alone.*test_questions\.py, line") as caught:
        olla_fx.optimize(model, X, solver="none")
    assert "u0" not in str(caught.value)


def test_examples_without_values_are_asked_for_real_ones():
    model = Written(lambda self, x: self.linear(x) if (x > 0).all() else x, linear=nn.Linear(3, 3)).eval()
    said = (
        r"asks for the value of input 0 → gt → all \(values/test_questions\.py, line \d+: .*\), and "
        r"input 0 of the example has no values.*give a real tensor"
    )
    with pytest.raises(CaptureError, match=said):
        olla_fx.plan(model, torch.empty(2, 3, device="meta"))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    with pytest.raises(CaptureError, match=said):
        olla_fx.plan(model, fake)
    assert olla_fx.plan(model, X).baseline is not None


def test_only_what_is_asked_needs_values():
    model = Written(lambda self, x, mask: x.exp() if mask.all() else x.sin())
    plan = olla_fx.plan(model.eval(), (torch.empty(2, 3, device="meta"), torch.ones(3)))
    assert plan.buffer_bytes == 0


MASKED = {
    "rows": lambda self, x: x.exp()[(x > 0)[:, 1]],
    "columns": lambda self, x: x.exp()[:, (x > 0)[0]],
    "elements": lambda self, x: x.exp()[x > 0],
    "mask and numbers": lambda self, x: x.exp()[(x > 0)[:, 0], torch.tensor([1])],
    "masked_select": lambda self, x: torch.masked_select(x.exp(), (x > 0)[:, :1]),
    "nonzero": lambda self, x: torch.nonzero(x > 0) + 1,
    "where": lambda self, x: torch.where(x > 0)[1] + 1,
    "repeat_interleave": lambda self, x: x.exp().repeat_interleave((x > 0).sum(1), 0),
    "constant": lambda self, x: x.exp()[torch.eye(2, 3, dtype=torch.bool)].view(2, 1),
    "uint8": lambda self, x: x.exp()[(x > 0).to(torch.uint8)],
    "a slice as long": lambda self, x: x.exp()[:, : int((x > 0).sum(1).max())].sin(),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_of_inputs(name):
    examples = [(X,), (X.flip(0, 1),), (X,), (-X,), (-X.abs(),), (-X,)]
    check_inference(Written(MASKED[name]), examples, None)


def test_a_mask_of_another_shape_is_rejected_as_in_eager():
    with pytest.raises(CaptureError, match=r"rejects the example input.*IndexError: a mask of shape \[3\]"):
        captured(lambda self, x, mask: x[mask], X, torch.ones(3, dtype=torch.bool))


def test_micro_batches_are_asked_each():
    model = Written(
        lambda self, x: self.linear(x) if (x > 0).all() else -self.linear(x), linear=nn.Linear(3, 3)
    )
    make = partial(
        olla_fx.optimize,
        loss_fn=lambda output, target: (output - target).square().mean(),
        optimizer=sgd(model.parameters()),
        accumulation_steps=2,
        solver="none",
    )
    mixed = torch.cat([torch.ones(2, 3), -torch.ones(2, 3)])
    with pytest.raises(CaptureError, match=r"True in the first micro-batch and False in number 2"):
        make(model, (mixed, torch.zeros(4, 3)))
    make(model, (mixed.abs(), torch.zeros(4, 3)))

    def asks_and_writes(self, x):
        is_positive = (x > 0).all()
        return self.linear(x.mul_(2)) if is_positive else -self.linear(x)

    model.written = asks_and_writes
    with pytest.raises(CaptureError, match="writes to that input in each micro-batch"):
        make(model, (mixed.abs(), torch.zeros(4, 3)))


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]


def test_packed_sequences_are_refused_with_the_right_reason():
    with pytest.raises(CaptureError, match=r"packs sequences .*pack_padded_sequence.*mask or gather"):
        olla_fx.optimize(Packing(), (torch.randn(2, 3, 4), torch.tensor([3, 2])), solver="none")
