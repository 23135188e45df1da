from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from olla_fx.errors import ModelLookupError
from olla_fx.models import (
    OPTIMIZERS,
    ModelCase,
    auxiliary_loss,
    build_model,
    import_torchvision,
    optimizer_by_name,
)


def loss_of(case: ModelCase) -> torch.Tensor:
    assert case.loss_fn is not None
    *inputs, target = case.inputs
    return case.loss_fn(case.model(*inputs), target)


@pytest.mark.parametrize(
    "name",
    [
        "torchvision:resnet18",
        "torchvision:vit_b_16",
        "torchvision:googlenet",
        "torchvision:inception_v3",
        "torchvision:r3d_18",
        "torchvision:maxvit_t",
        "torchvision:deeplabv3_mobilenet_v3_large",
        "torchvision:lraspp_mobilenet_v3_large",
        "torchvision:regnet_x_400mf",  # reads its own initial values: is built by way of the CPU
        "transformers:bert",
        "transformers:xlm-roberta-base",
        "transformers:vit",
        "torch:transformer",
        "torch:transformer-1",
    ],
)
def test_models_build_on_the_meta_device_and_their_loss_is_a_scalar(name: str) -> None:
    case = build_model(name, batch_size=2, device="meta")
    tensors = [*case.model.parameters(), *case.model.buffers(), *case.inputs]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert case.model.training
    assert loss_of(case).shape == ()


@pytest.mark.parametrize("name", ["transformers:roberta", "transformers:gpt2", "transformers:llama"])
def test_text_models_learn_on_the_cpu(name: str) -> None:
    case = build_model(name, batch_size=2, tokens=4)
    loss = loss_of(case)
    loss.backward()
    assert torch.isfinite(loss)
    assert case.inputs[0].shape == (2, 4)


def test_sizes_are_what_the_model_was_made_for_unless_given() -> None:
    def shape(name: str, **options: int) -> tuple[int, ...]:
        return tuple(build_model(name, batch_size=2, device="meta", **options).inputs[0].shape)

    assert shape("torchvision:resnet18") == (2, 3, 224, 224)
    assert shape("torchvision:inception_v3") == (2, 3, 299, 299)
    assert shape("torchvision:r3d_18") == (2, 3, 1, 112, 112)
    assert shape("torchvision:vit_b_16", image_size=64) == (2, 3, 64, 64)
    assert shape("torch:transformer") == (10, 2, 512)


def test_inference_has_neither_target_nor_loss() -> None:
    case = build_model("torchvision:alexnet", train=False, device="meta")
    assert len(case.inputs) == 1
    assert case.loss_fn is None
    assert not case.model.training


def test_auxiliary_classifiers_count_with_their_weight() -> None:
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    alone = auxiliary_loss(logits, target, weight=0.3)
    assert torch.equal(auxiliary_loss((logits, None, None), target, weight=0.3), alone)
    torch.testing.assert_close(auxiliary_loss((logits, logits, logits), target, weight=0.3), 1.6 * alone)


FACTORY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1000))

def case(batch_size):
    linear = nn.Linear(4, 2)
    return linear, (torch.randn(batch_size, 4), torch.randn(batch_size, 2)), nn.functional.mse_loss

def nothing():
    return 3

def broken():
    raise ValueError("out of flour")
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "factory.py"
    path.write_text(FACTORY, encoding="utf-8")
    return path


def test_a_factory_returns_a_model_or_a_whole_case(factory_file: Path) -> None:
    model = build_model(f"{factory_file}:model", batch_size=2, image_size=8)
    assert loss_of(model).shape == ()
    case = build_model(f"{factory_file}:case", batch_size=5, device="meta")
    assert case.inputs[0].shape == (5, 4)
    assert case.inputs[0].is_meta
    assert len(build_model(f"{factory_file}:case", train=False).inputs) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:resnet19", "did you mean resnet"),
        ("torchvison:resnet18", "Did you mean torchvision:resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", "detection"),
        ("torchvision:", "unknown model"),
        ("transformers:bertt", "did you mean bert"),
        ("torch:lstm", "unknown torch model"),
        ("resnet18", "A name is one of"),
        ("missing.py:model", "no file missing.py"),
    ],
)
def test_unknown_names_say_what_is_known(name: str, message: str) -> None:
    with pytest.raises(ModelLookupError, match=message):
        build_model(name)


def test_a_factory_that_fails_is_named(factory_file: Path) -> None:
    for function, message in [("nothing", "not int"), ("broken", "out of flour"), ("absent", "defines no")]:
        with pytest.raises(ModelLookupError, match=message):
            build_model(f"{factory_file}:{function}")


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"image_size": 0}, {"tokens": -1}])
def test_sizes_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ModelLookupError, match="at least 1"):
        build_model("torchvision:resnet18", **options)


def test_batch_normalisation_over_one_value_is_refused() -> None:
    with pytest.raises(ModelLookupError, match="at least 2"):
        build_model("torchvision:inception_v3", batch_size=1, device="meta")
    build_model("torchvision:inception_v3", batch_size=1, train=False, device="meta")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLookupError, match=r"pip install 'olla-fx\[models\]'"):
        build_model("torchvision:resnet18")


def test_torchvision_is_imported_once() -> None:
    assert import_torchvision() is import_torchvision()


def test_torchvision_imports_after_its_plain_import_failed() -> None:
    program = (
        "import contextlib\n"
        "with contextlib.suppress(Exception):\n"
        "    import torchvision\n"
        "from olla_fx.models import import_torchvision\n"
        "assert import_torchvision().models.resnet18\n"
    )
    root = Path(__file__).parents[2]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "solvers")])}
    subprocess.run([sys.executable, "-c", program], check=True, env=paths)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_only_what_is_trained(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = optimizer_by_name(name, model.parameters(), lr=0.5)
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight]]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_unknown_optimizer_names_the_known_ones() -> None:
    with pytest.raises(ModelLookupError, match="sgd-momentum"):
        optimizer_by_name("sdg", [])
