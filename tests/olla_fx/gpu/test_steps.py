"""Planned steps on a GPU against eager's, bit for bit, and what they take of its memory."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler

import olla_fx
from olla_fx.errors import BufferMemoryError, CaptureError, UnsupportedOptimizerError
from olla_fx.models import build_model
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import (
    OwnLoop,
    WholeStep,
    assert_served,
    assert_served_if_settled,
    check_inference,
)
from tests.olla_fx.helpers import SmallNet, skip_without

MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9, foreach=False)
MODELS = (
    "alexnet", "vgg11", "resnet18", "resnet50", "squeezenet1_0", "mobilenet_v2", "mnasnet0_5",
    "efficientnet_b0", "googlenet", "vit_b_16", "densenet121",
)  # fmt: skip
IMAGE_SIZES = {"alexnet": 224, "vgg11": 224, "vit_b_16": 224}
"""Elsewhere 64. Adaptive pooling whose windows overlap adds up by atomics, in an order that changes; with
images of the size that AlexNet and VGG were made for, none does."""


def images(device, count, batch=4, size=16, classes=5):
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(batch, 3, size, size, generator=generator).to(device),
            torch.randint(classes, (batch,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "make_optimizer",
    [
        MOMENTUM,
        partial(optim.Adam, lr=1e-3, foreach=False),
        partial(optim.AdamW, lr=1e-3, foreach=False, capturable=True),
    ],
    ids=["SGD", "Adam", "capturable AdamW"],
)
def test_twenty_steps_equal_eager(device, make_optimizer):
    batches = images(device, 20)
    pair = WholeStep(
        SmallNet().to(device), make_optimizer, batches[0], scheduler=partial(lr_scheduler.StepLR, step_size=5)
    )
    pair.run(batches)
    assert pair.step.stats.replans == 0


@pytest.mark.parametrize("name", MODELS)
def test_models_of_torchvision_train_as_in_eager(device, name):
    skip_without("torchvision")
    if name == "vit_b_16":
        # Attention's backward repeats itself in the strict mode alone, which refuses the others' pooling.
        torch.use_deterministic_algorithms(True)
    case = build_model(f"torchvision:{name}", batch_size=2, image_size=IMAGE_SIZES.get(name, 64))
    batch = tuple(tensor.to(device) for tensor in case.inputs)
    pair = WholeStep(case.model.to(device), partial(optim.SGD, lr=0.01, foreach=False), batch, case.loss_fn)
    pair.run([batch] * 4)


def test_attention_trains_as_in_eager(device):
    torch.use_deterministic_algorithms(True)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32 * 8, 5)).to(device)
    generator = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randn(4, 8, 32, generator=generator).to(device),
            torch.randint(5, (4,), generator=generator).to(device),
        )
        for _ in range(6)
    ]
    WholeStep(model, MOMENTUM, batches[0]).run(batches)


def test_bfloat16_autocast_equals_eager(device):
    """As its documentation asks for: around forward and loss alone, anew in every step.

    A context that outlives a step keeps weights that it has cast, also when the optimizer has changed them.
    """
    batches = images(device, 8)
    autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    with autocast():
        pair = WholeStep(SmallNet().to(device), MOMENTUM, batches[0])
    for index, (x, y) in enumerate(batches):
        pair.step.poison()
        pair.optimizers[0].zero_grad()
        torch.manual_seed(index)
        with autocast():
            loss = F.cross_entropy(pair.eager(x), y)
        loss.backward()
        pair.optimizers[0].step()
        torch.manual_seed(index)
        with autocast():
            given = pair.step(x, y)
        assert_same(loss.detach(), given, f"loss of step {index}")
        assert_served_if_settled(pair.step, 1)
    pair.compare()


def test_inference_equals_eager(device):
    check_inference(SmallNet().to(device), [(x,) for x, _ in images(device, 6)], outputs=1)


def test_a_frozen_batch_norm_trains_as_in_eager(device):
    model = SmallNet().to(device)
    model.norm.eval()
    batches = images(device, 6)
    WholeStep(model, MOMENTUM, batches[0]).run(batches)


def test_the_callers_own_loop_equals_eager(device):
    batches = images(device, 8)
    OwnLoop(SmallNet().to(device), batches[0][0], MOMENTUM).run(batches).assert_served()


def test_the_measured_peak_is_the_planned_one(device):
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 5))
    model = model.to(device)
    optimizer = MOMENTUM(model.parameters())
    x, y = torch.randn(512, 256, device=device), torch.randint(5, (512,), device=device)
    step = olla_fx.optimize(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, fallback="raise")
    for _ in range(4):
        step(x, y)
    gc.collect()
    assert_served(step, 1)
    settled = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss = step(x, y)
    # The loss is all that is not in the buffer.
    assert torch.cuda.max_memory_allocated(device) - settled == 512
    assert step.plan.buffer_bytes == step.plan.peak_bytes
    assert loss.isfinite().item()


def test_cudnn_benchmark_mode_is_recorded_after_its_trials(device):
    """Of a size that no other test has, or cuDNN's choice would be there already."""
    batches = images(device, 6, size=19)
    with (
        torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False),
        # Each thread tries for itself and may choose otherwise; eager's backward has one of its own.
        torch.autograd.set_multithreading_enabled(False),
    ):
        pair = WholeStep(SmallNet().to(device), MOMENTUM, batches[0]).run(batches)
    assert pair.step.stats.counts.outside == 0


def test_a_switch_of_benchmark_mode_plans_again(device):
    batches = images(device, 8)
    pair = WholeStep(SmallNet().to(device), MOMENTUM, batches[0])
    for batch in batches[:4]:
        pair.train(batch)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
        for batch in batches[4:]:
            pair.train(batch)
    assert pair.step.stats.replans == 1
    pair.compare()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "inference"])
def test_cuda_graphs_equal_eager(device, kind):
    batches = images(device, 8)
    if kind == "inference":
        step = check_inference(SmallNet().to(device), [(x,) for x, _ in batches], outputs=1, cuda_graph=True)
    else:
        make = MOMENTUM
        if kind == "Adam":
            make = partial(optim.Adam, lr=torch.tensor(1e-3, device=device), capturable=True, foreach=False)
        step = WholeStep(SmallNet().to(device), make, batches[0], cuda_graph=True).run(batches).step
    assert step.stats.graphed.fallback is None
    assert step.stats.graphed.captures == 1
    assert step.stats.graphed.replays >= 4


def test_a_graph_on_another_stream_waits_for_the_one_before(device):
    """The second call's input must not reach the graph while the first one is still to run."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(device).eval()
    module = olla_fx.optimize(
        model, torch.zeros(32, 64, device=device), solver="none", cuda_graph=True, fallback="raise"
    )
    inputs = [torch.randn(32, 64, device=device) for _ in range(2)]
    for _ in range(5):
        module(inputs[0])
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    torch.cuda.synchronize(device)
    answers = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda._sleep(0 if answers else 50_000_000)
            answers.append(module(x))
    torch.cuda.synchronize(device)
    assert_same(expected, answers, "answers")
    assert module.stats.graphed.fallback is None


def test_a_learning_rate_in_a_tensor_takes_effect_in_a_graph(device):
    batches = images(device, 8)
    rate = torch.tensor(1e-3, device=device)
    make = partial(optim.Adam, lr=rate, capturable=True, foreach=False)
    pair = WholeStep(SmallNet(0.0).to(device), make, batches[0], cuda_graph=True)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = rate.clone()
    for index, batch in enumerate(batches):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (index + 1))
        pair.train(batch)
    pair.compare()
    assert pair.step.stats.graphed.captures == 1


def test_a_number_that_changes_in_a_graph_is_captured_anew(device):
    batches = images(device, 8)
    pair = WholeStep(SmallNet().to(device), MOMENTUM, batches[0], cuda_graph=True)
    for index, batch in enumerate(batches):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 if index < 6 else 0.05
        pair.train(batch)
    pair.compare()
    assert pair.step.stats.graphed.captures == 2


def test_a_graph_needs_an_optimizer_that_keeps_its_numbers_in_tensors(device):
    model = SmallNet().to(device)
    (batch,) = images(device, 1)
    for optimizer, message in (
        (optim.Adam(model.parameters()), "capturable=True and a tensor"),
        (optim.Adagrad(model.parameters()), "Adagrad counts its steps"),
    ):
        with pytest.raises(UnsupportedOptimizerError, match=message):
            olla_fx.optimize(
                model,
                batch,
                loss_fn=F.cross_entropy,
                optimizer=optimizer,
                cuda_graph=True,
                solver="none",
                fallback="raise",
            )
    with pytest.raises(CaptureError, match="whole training step or an inference"):
        olla_fx.optimize(model, batch[0], cuda_graph=True, solver="none", fallback="raise")


def test_steps_on_changing_streams_equal_eager(device):
    batches = images(device, 8)
    pair = WholeStep(SmallNet().to(device), MOMENTUM, batches[0])
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
    for index, batch in enumerate(batches):
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[index % 2]):
            torch.cuda.synchronize(device)
            pair.train(batch)
        torch.cuda.synchronize(device)
    pair.compare()


@torch.library.custom_op("olla_fx_tests::greedy", mutates_args=())
def greedy(tensor: torch.Tensor) -> torch.Tensor:
    if greedy_asks[0]:
        torch.empty(2**48, dtype=torch.uint8, device=tensor.device)
    return tensor.clone()


@greedy.register_fake
def _(tensor):
    return torch.empty_like(tensor)


greedy.register_autograd(lambda ctx, gradient: gradient)
greedy_asks = [False]


class Greedy(nn.Module):
    """Asks for more memory than there is in the middle of its forward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(greedy(self.first(x).relu()))


@pytest.mark.parametrize("calls_before", [0, 1, 4])
def test_out_of_memory_in_the_middle_of_a_step_leaves_a_step_that_works(device, calls_before):
    batch = torch.randn(4, 8, device=device), torch.randint(5, (4,), device=device)
    pair = WholeStep(Greedy().to(device), partial(optim.SGD, lr=0.1, foreach=False), batch)
    for _ in range(calls_before):
        pair.train(batch)
    greedy_asks[0] = True
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            pair.step(*batch)
    finally:
        greedy_asks[0] = False
    for _ in range(4):
        pair.train(batch)
    pair.compare()


def test_a_buffer_that_does_not_fit_says_how_much_is_missing(device):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5)).to(device)
    x, y = torch.randn(4096, 1024, device=device), torch.randint(5, (4096,), device=device)
    step = olla_fx.optimize(
        model,
        (x, y),
        loss_fn=F.cross_entropy,
        optimizer=optim.SGD(model.parameters()),
        solver="none",
        fallback="raise",
    )
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total_bytes, device)
    try:
        with pytest.raises(BufferMemoryError, match=r"planned are .* beside .* free are .* A budget of"):
            step(x, y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert step(x, y).isfinite().item()
