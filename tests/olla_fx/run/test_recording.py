"""Runs that are recorded or timed free what the others free, and when they do."""

import weakref

import torch
import torch.nn.functional as F
from torch import fx, nn

from olla_fx.run.recording import NotingInterpreter
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import Written, sgd


def test_what_nobody_reads_is_freed_at_once():
    made = []

    def make(x):
        result = x + 1
        made.append(weakref.ref(result))
        return result

    def read(x):
        assert made[0]() is None
        return x + 2

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(make, (x,))
    graph.output(graph.call_function(read, (x,)))
    interpreter = NotingInterpreter(fx.GraphModule({}, graph), {}, torch.device("cpu"), {})
    assert torch.equal(interpreter.run(torch.ones(2)), torch.full((2,), 3.0))


def draws_for_nobody(self, x):
    x = self.body(x)
    F.dropout(x, 0.5)
    return self.head(x)


def test_a_draw_for_nobody_does_not_keep_a_budget_from_settling():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())]
    batches = [(torch.randn(4096, 16), torch.randint(5, (4096,))) for _ in range(6)]
    model = Written(draws_for_nobody, body=nn.Sequential(*layers), head=nn.Linear(16, 5))
    pair = WholeStep(model, sgd, batches[0], memory_budget=0.7, runs_to_settle=4).run(batches)
    assert pair.step.plan.recomputed.operators
    assert pair.step.plan.measured_extra_time is not None
