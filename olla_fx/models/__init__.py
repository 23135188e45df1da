"""Builds models by name, with an example and a loss: for the command line, tests and benchmarks.

Names are ``torchvision:resnet18``, ``transformers:bert`` (a small configuration; ``transformers:bert-base``
for the size the architecture was published with), ``torch:transformer`` and ``path/to/file.py:factory``.
Weights are never downloaded: every model starts from its own initialisation, or from nothing at all on the
meta device, where a model and batch of any size can be planned without their memory.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.errors import ModelLookupError
from olla_fx.models.case import CLASSES, IMAGE_SIZE, LossFunction, ModelCase, Wanted, labels, unknown
from olla_fx.models.optimizers import OPTIMIZERS, optimizer_by_name
from olla_fx.models.text import TOKENS, CausalLanguageModel, logits_loss, transformers_case
from olla_fx.models.vision import auxiliary_loss, import_torchvision, segmentation_loss, torchvision_case

__all__ = [
    "FAMILIES",
    "OPTIMIZERS",
    "TOKENS",
    "CausalLanguageModel",
    "LossFunction",
    "ModelCase",
    "auxiliary_loss",
    "build_model",
    "import_torchvision",
    "logits_loss",
    "optimizer_by_name",
    "segmentation_loss",
]

FAMILIES = ("torchvision:NAME", "transformers:ARCHITECTURE", "torch:transformer", "path/to/file.py:factory")
"""The forms of a model's name."""

_TRANSFORMER_WIDTH = 512
_SOURCE_TOKENS = 10
_TARGET_TOKENS = 20


_Build = Callable[[str, Wanted], ModelCase]


def build_model(
    name: str,
    *,
    batch_size: int = 1,
    image_size: int | None = None,
    tokens: int = TOKENS,
    train: bool = True,
    device: str = "cpu",
) -> ModelCase:
    """Build a model by its name.

    Args:
        name: in one of the forms of :data:`FAMILIES`.
        batch_size: examples in a batch.
        image_size: height and width of images; None for what the model was made for.
        tokens: length of text.
        train: True for a training case, with a target and a loss.
        device: of model and example; ``meta`` needs no memory.

    Returns:
        The model, an example of random numbers, and the loss.

    Raises:
        ModelLookupError: if the name is unknown, its package is not installed, or the model cannot be built
            in this size.
    """
    for size_name, size in (
        ("batch size", batch_size),
        ("image size", image_size),
        ("number of tokens", tokens),
    ):
        if size is not None and size < 1:
            raise ModelLookupError(f"the {size_name} must be at least 1, not {size}")
    build, short_name = _builder(name)
    wanted = Wanted(batch_size, image_size, tokens, train)
    try:
        case = _build_on(device, lambda: build(short_name, wanted))
    except ModelLookupError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelLookupError(f"model {name!r} cannot be built: {reason}") from error
    case.model.train(train)
    return case if train else ModelCase(case.model, case.inputs[:-1] if case.loss_fn else case.inputs, None)


def _builder(name: str) -> tuple[_Build, str]:
    """Return the function that builds a model, and the name to call it with."""
    family, _, short_name = name.partition(":")
    builders: dict[str, _Build] = {
        "torchvision": torchvision_case,
        "transformers": transformers_case,
        "torch": _torch_case,
    }
    if short_name and family in builders:
        return builders[family], short_name
    path, _, factory = name.rpartition(":")
    if path.endswith(".py") and factory:
        return _file_case, name
    close = difflib.get_close_matches(family, builders, n=1)
    hint = f" Did you mean {close[0]}:{short_name or 'NAME'}?" if close else ""
    raise ModelLookupError(f"unknown model {name!r}.{hint} A name is one of: {', '.join(FAMILIES)}")


def _build_on(device: str, build: Callable[[], ModelCase]) -> ModelCase:
    """Build on a device; by way of the CPU if initialisation reads its own values back."""
    try:
        with torch.device(device):
            return build()
    except NotImplementedError:
        case = build()
        inputs = tuple(leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in case.inputs)
        return ModelCase(case.model.to(device), inputs, case.loss_fn)


def _torch_case(name: str, wanted: Wanted) -> ModelCase:
    sizes: dict[str, dict[str, int]] = {
        "transformer": {},
        "transformer-1": {"num_encoder_layers": 1, "num_decoder_layers": 1, "nhead": 1},
    }
    if name not in sizes:
        raise unknown(name, "torch", sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # of no use in training
        model = nn.Transformer(**sizes[name])  # type: ignore[arg-type]
    source = torch.randn(_SOURCE_TOKENS, wanted.batch_size, _TRANSFORMER_WIDTH)
    target, answer = (torch.randn(_TARGET_TOKENS, wanted.batch_size, _TRANSFORMER_WIDTH) for _ in range(2))
    return ModelCase(model, (source, target, answer), F.mse_loss)


def _file_case(name: str, wanted: Wanted) -> ModelCase:
    """Call a factory: it returns a model for images, or (model, example, loss_fn)."""
    path, _, function_name = name.rpartition(":")
    factory = getattr(_import_file(Path(path)), function_name, None)
    if not callable(factory):
        raise ModelLookupError(f"{path} defines no function {function_name!r}")
    takes_batch_size = "batch_size" in inspect.signature(factory).parameters
    made = factory(batch_size=wanted.batch_size) if takes_batch_size else factory()
    if isinstance(made, nn.Module):
        size = wanted.image_size or IMAGE_SIZE
        x = torch.randn(wanted.batch_size, 3, size, size)
        return ModelCase(made, (x, labels(CLASSES, wanted)), F.cross_entropy)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        model, example, loss_fn = made
        return ModelCase(model, example if isinstance(example, tuple) else (example,), loss_fn)
    raise ModelLookupError(
        f"{name} must return a model or (model, example, loss_fn), not {type(made).__name__}"
    )


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelLookupError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelLookupError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
