"""Which profile a device gets, and what its figures make of an operator's work."""

import pytest
import torch

from olla_fx.costs import PROFILES, Work, profile_by_name, profile_of
from olla_solvers.errors import OptionError


def test_an_operator_takes_a_launch_and_the_longer_of_computing_and_moving():
    a100 = profile_by_name("a100")
    products = int(0.6 * 156e12)

    def seconds(flops, dtype, moved_bytes):
        return a100.seconds("mm", Work(flops, dtype, moved_bytes))

    assert seconds(0, torch.float32, 0) == pytest.approx(5e-6)
    assert seconds(products, torch.float32, 10) == pytest.approx(1 + 5e-6)
    assert seconds(products, torch.bfloat16, 10) == pytest.approx(0.5 + 5e-6)
    assert seconds(10, torch.float32, int(1.5e12)) == pytest.approx(1 + 5e-6)
    assert seconds(products, torch.int8, 0) == pytest.approx(1 + 5e-6)


def test_slow_operators_take_longer():
    work = Work(0, torch.float32, 1 << 20)
    cpu = PROFILES["cpu"]
    launch = cpu.launch_seconds
    ratio = (cpu.seconds("bernoulli", work) - launch) / (cpu.seconds("relu", work) - launch)
    assert ratio == pytest.approx(cpu.slow["bernoulli"])


def test_more_threads_compute_faster():
    one, four, many = (PROFILES["cpu"].with_threads(threads) for threads in (1, 4, 64))
    assert four.rate(torch.float32) == 4 * one.rate(torch.float32)
    assert four.bandwidth == 4 * one.bandwidth
    assert many.bandwidth == 8 * one.bandwidth
    torch.set_num_threads(2)
    assert profile_of(torch.device("cpu")) == PROFILES["cpu"].with_threads(2)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "a100"),
    ],
)
def test_a_gpu_gets_its_own_profile_or_the_usual_one(monkeypatch, name, profile):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert profile_of(torch.device("cuda", 0)).name == profile


def test_a_device_that_is_not_there_gets_that_of_its_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile_of(torch.device("cuda", 0)).name == "a100"
    assert profile_of(torch.device("meta")).name == "cpu"


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(OptionError, match=r"'v100'.*a100, h100, h200, gtx1080ti, cpu"):
        profile_by_name("v100")
