"""Steps alternate, run in several threads, and survive kernels that use threads."""

import copy
import threading
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import MOMENTUM, SmallNet, images, mlp, vectors


def test_two_steps_alternate():
    convolutions = WholeStep(SmallNet(), optim.AdamW, images(1)[0])
    layers = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    answer = check_inference(mlp().eval(), [(x,) for x, _ in vectors(2)], 1)
    for batch, vector in zip(images(20), vectors(20), strict=True):
        convolutions.train(batch)
        layers.train(vector)
        answer.poison()
        answer(vector[0])
    convolutions.compare()
    layers.compare()


def test_training_and_inference_of_one_model_alternate():
    model = SmallNet(0.0)
    pair = WholeStep(model, MOMENTUM, images(1)[0])
    fast = olla_fx.optimize(model.eval(), images(1)[0][0], solver="none", fallback="raise")
    for batch in images(20):
        model.train()
        pair.train(batch)
        model.eval()
        fast.poison()
        with torch.no_grad():
            assert_same(model(batch[0]), fast(batch[0]), "answer")


def test_calls_from_several_threads_are_taken_one_by_one():
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none", fallback="raise")
    inputs = [torch.randn(4, 6) for _ in range(40)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    given = {}
    faults = []

    def work(start):
        try:
            for index in range(start, len(inputs), 4):
                given[index] = step(inputs[index])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for index, answer in enumerate(expected):
        assert_same(answer, given[index], f"answer {index}")
    assert_served(step, 1)


def test_training_in_another_thread_than_planning():
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    faults = []

    def work(batches):
        try:
            pair.run(batches)
        except BaseException as error:
            faults.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work, args=(vectors(2),))
        thread.start()
        thread.join()
    pair.run(vectors(2))
    assert not faults


class Attention(nn.Module):
    """bf16 attention, whose backward allocates on worker threads, in another order every time."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96, dtype=torch.bfloat16)

    def forward(self, x):
        query, key, value = self.project(x).view(2, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_attention_backward_replayed_two_hundred_times_with_two_threads():
    torch.set_num_threads(2)
    x, target = (
        torch.randn(2, 128, 32, dtype=torch.bfloat16),
        torch.randn(2, 2, 128, 16, dtype=torch.bfloat16),
    )
    pair = WholeStep(Attention(), partial(optim.SGD, lr=0.5), (x, target), F.mse_loss)
    start = copy.deepcopy(pair.eager.state_dict())
    pair.train((x, target))
    expected = copy.deepcopy(pair.eager.state_dict())
    workers = 0
    for _ in range(200):
        pair.model.load_state_dict(start)
        pair.step.poison()
        pair.step(x, target)
        workers = max(workers, pair.step.stats.counts.requests_on_worker_threads)
        assert_served(pair.step, 1)
        for name, value in pair.model.state_dict().items():
            assert_same(expected[name], value, name)
    assert workers > 0
