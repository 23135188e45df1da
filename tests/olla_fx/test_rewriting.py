"""The choice among rewrites: never more memory than without, and nothing that does not pay."""

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.passes.rewrites import probes
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import REWRITES
from olla_fx.rewriting import COSTLY, Rewriting, choose_rewrites
from olla_solvers.order import order_quickly
from tests.olla_fx.helpers import captured_training, images


def rewriting_of(model, example):
    probe = Probe(torch.device("cpu"), True, lambda question, answer: answer())
    return Rewriting(captured_training(model, example), GradientsInBuffer(), probe)


def random_model(seed):
    """A random sequence of convolutions, poolings and activations."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]()

    layers, channels = [], 3
    for _ in range(5):
        layers.append(nn.Conv2d(channels, 4, 3, padding=1))
        channels = 4
        layers.append(choose(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Identity))
        layers.append(
            choose(lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), lambda: nn.Dropout(0.5), nn.Identity)
        )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_graph_is_worse_than_without(seed, batch):
    rewriting = rewriting_of(random_model(seed), images(1, batch=batch, size=32)[0])
    chosen = choose_rewrites(rewriting, REWRITES)
    peaks = [
        order_quickly(candidate.dataflow.problem).peak_bytes
        for candidate in (chosen, rewriting.candidate(()))
    ]
    assert peaks[0] < peaks[1] if chosen.changes else peaks[0] == peaks[1]


def test_costly_rewrites_that_save_nothing_are_left_out():
    """The peak is in the first block, far from the pooling."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU6(), nn.Conv2d(32, 2, 3, 2), nn.ReLU()]
    last = [nn.MaxPool2d(2), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.LazyLinear(5)]
    model = nn.Sequential(*first, *last)
    example = images(1, size=32)[0]
    model(example[0])
    chosen = choose_rewrites(rewriting_of(model, example), REWRITES)
    names = {change.rewrite for change in chosen.changes}
    assert names
    assert not names & COSTLY


def test_without_rewrites_there_is_one_graph():
    chosen = choose_rewrites(rewriting_of(random_model(0), images(1, size=32)[0]), ())
    assert chosen.changes == ()
    assert chosen.schedule is None


def test_the_report_says_what_kernels_do_not_allow(monkeypatch):
    monkeypatch.setenv("OLLA_FX_CACHE_DIR", "")
    monkeypatch.setattr(probes, "_is_equal_in_blocks", lambda *_: False)
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4))
    example = torch.randn(8, 512), torch.randint(4, (8,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = olla_fx.optimize(model, example, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
    rows = dict(step.plan.rows())
    assert rows["not used, as kernels' bits differ here"] == "product in blocks"
    assert "rewritten: blocked updates" not in rows
