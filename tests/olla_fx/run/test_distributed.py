"""Two processes train one model: gloo's all-reduce works on the gradients of a planned own loop."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import olla_fx

STEPS = 20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def train(rank, folder):
    os.environ["OLLA_FX_CACHE_DIR"] = ""
    torch.set_num_threads(1)
    # Through a file: a port that was free may be another program's by now.
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    try:
        results = {}
        for kind in ("eager", "planned"):
            model = make_model()
            module = (
                model
                if kind == "eager"
                else olla_fx.optimize(model, torch.ones(2, 3, 8, 8), solver="none", fallback="raise")
            )
            parallel = nn.parallel.DistributedDataParallel(module)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(STEPS):
                x = torch.randn(2, 3, 8, 8, generator=generator)
                y = torch.randint(5, (2,), generator=generator)
                optimizer.zero_grad()
                F.cross_entropy(parallel(x), y).backward()
                optimizer.step()
                if kind == "planned":
                    module.poison()
            results[kind] = model.state_dict()
            if kind == "planned":
                counts = module.stats.counts
                results["served"] = (
                    str(module.stats.binding),
                    counts.served,
                    counts.outside,
                    module.stats.stock_runs,
                )
        torch.save(results, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_two_processes(tmp_path):
    mp.spawn(train, (tmp_path,), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for result in results:
        binding, served, outside, stock_runs = result["served"]
        assert binding == "buffer"
        assert served > 0
        assert outside == stock_runs == 0
        for name, value in result["eager"].items():
            assert torch.equal(value, result["planned"][name]), name
    weights = [result["planned"]["0.weight"] for result in results]
    assert torch.equal(*weights)
