"""Builds models by name, with an example and a loss: for the command line, tests and benchmarks.

Names are ``torchvision:resnet18``, ``transformers:bert`` (a small configuration; ``transformers:bert-base``
for the size the architecture was published with), ``torch:transformer`` and ``path/to/file.py:factory``.
Weights are never downloaded: every model starts from its own initialisation, or from nothing at all on the
meta device, where a model and batch of any size can be planned without their memory.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.errors import ModelLookupError

LossFunction = Callable[..., torch.Tensor]

FAMILIES = ("torchvision:NAME", "transformers:ARCHITECTURE", "torch:transformer", "path/to/file.py:factory")
"""The forms of a model's name."""

IMAGE_SIZE = 224
TOKENS = 16
_CLASSES = 1000
_INCEPTION_SIZE = 299
_VIDEO_SIZES = {
    "r3d_18": (1, 112), "mc3_18": (1, 112), "r2plus1d_18": (1, 112), "s3d": (16, 224),
    "mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224),
    "swin3d_t": (16, 224), "swin3d_s": (16, 224), "swin3d_b": (16, 224),
}  # fmt: skip
"""Frames and image size of one video."""

_ARCHITECTURES = {
    "bert": "classify", "distilbert": "classify", "electra": "classify", "roberta": "classify",
    "xlm-roberta": "classify", "gpt2": "generate", "llama": "generate", "vit": "see",
}  # fmt: skip
"""What each supported architecture of transformers is built for."""

_SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 1024, "embedding_size": 128,
}  # fmt: skip
_TRANSFORMER_WIDTH = 512
_SOURCE_TOKENS = 10
_TARGET_TOKENS = 20


@dataclass(frozen=True)
class ModelCase:
    """A model with all that planning its step needs.

    Attributes:
        model: in training or evaluation mode, as asked.
        inputs: an example: the model's arguments and, for training, the target as the last.
        loss_fn: ``loss_fn(model(*inputs), target)``; None for inference.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss_fn: LossFunction | None


@dataclass(frozen=True)
class _Wanted:
    """The arguments of :func:`build_model` behind the name."""

    batch_size: int
    image_size: int | None
    tokens: int
    train: bool


_Build = Callable[[str, _Wanted], ModelCase]


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
        train: whether to make a training case, with a target and a loss.
        device: where model and example live; ``meta`` needs no memory.

    Returns:
        The model, an example of random numbers, and the loss.

    Raises:
        ModelLookupError: when the name is unknown, its package is not installed, or the model cannot be
            built in this size.
    """
    if batch_size < 1:
        raise ModelLookupError(f"the batch size must be at least 1, not {batch_size}")
    if image_size is not None and image_size < 1:
        raise ModelLookupError(f"the image size must be at least 1, not {image_size}")
    if tokens < 1:
        raise ModelLookupError(f"the number of tokens must be at least 1, not {tokens}")
    build, short_name = _builder(name)
    wanted = _Wanted(batch_size, image_size, tokens, train)
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
    """The function that builds a name, and what it is to be given."""
    family, _, short_name = name.partition(":")
    builders: dict[str, _Build] = {
        "torchvision": _torchvision_case,
        "transformers": _transformers_case,
        "torch": _torch_case,
    }
    if short_name and family in builders:
        return builders[family], short_name
    path, _, factory = name.rpartition(":")
    if path.endswith(".py") and factory:
        return _file_case, name
    close = [f"{each}:{short_name or 'NAME'}" for each in difflib.get_close_matches(family, builders, n=1)]
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ModelLookupError(f"unknown model {name!r}.{hint} A name is one of: {', '.join(FAMILIES)}")


def _build_on(device: str, build: Callable[[], ModelCase]) -> ModelCase:
    """Build on a device; by way of the CPU where initialisation reads its own values back."""
    try:
        with torch.device(device):
            return build()
    except NotImplementedError:
        case = build()
        inputs = tuple(each.to(device) if isinstance(each, torch.Tensor) else each for each in case.inputs)
        return ModelCase(case.model.to(device), inputs, case.loss_fn)


def _unknown(name: str, family: str, known: Iterable[str]) -> ModelLookupError:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"some that are known: {', '.join(names[:12])}"
    return ModelLookupError(f"unknown {family} model {name!r}; {hint}")


# torchvision

_operator_library: torch.library.Library | None = None
"""Holds the stand-in operators; they vanish with it."""


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled half does not fit the installed torch.

    torchvision's wheels on the package index are built for CUDA. Under a torch for CPUs its library does
    not load, and the import ends at two operators that only detection models use. Only then are these
    declared, without a body, and torchvision imported again: its other models are plain Python.

    Returns:
        The module.

    Raises:
        ModelLookupError: when torchvision is not installed.
    """
    global _operator_library
    _require_package("torchvision")
    try:
        return importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        if _operator_library is not None:
            raise
    for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _operator_library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _operator_library.define(schema)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")


def _require_package(package: str) -> None:
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ModelLookupError(f"{package} is not installed; pip install 'olla-fx[models]'")


def _torchvision_case(name: str, wanted: _Wanted) -> ModelCase:
    models = import_torchvision().models
    images, segmentation, videos = (
        set(models.list_models(module=each)) for each in (models, models.segmentation, models.video)
    )
    if name in images:
        return _image_case(models, name, wanted)
    if name in segmentation:
        return _segmentation_case(models, name, wanted)
    if name in videos:
        frames, size = _VIDEO_SIZES.get(name, (16, IMAGE_SIZE))
        size = wanted.image_size or size
        x = torch.randn(wanted.batch_size, 3, frames, size, size)
        return ModelCase(models.get_model(name, weights=None), (x, _labels(400, wanted)), F.cross_entropy)
    if name in set(models.list_models()):
        raise ModelLookupError(
            f"torchvision model {name!r} is quantised or takes more than images and class labels (detection, "
            "optical flow); build it in a file of your own and pass path/to/file.py:factory"
        )
    raise _unknown(name, "torchvision", images | segmentation | videos)


def _image_case(models: ModuleType, name: str, wanted: _Wanted) -> ModelCase:
    inception = name == "inception_v3"
    size = wanted.image_size or (_INCEPTION_SIZE if inception else IMAGE_SIZE)
    options: dict[str, Any] = {}
    loss: LossFunction = F.cross_entropy
    if name in ("googlenet", "inception_v3"):
        # Their initialisation takes half a minute and is left to those who train them for real.
        options["init_weights"] = False
        loss = functools.partial(auxiliary_loss, weight=0.4 if inception else 0.3)
    elif name.startswith("vit_"):
        options["image_size"] = size
    elif name.startswith("maxvit"):
        options["input_size"] = (size, size)
    if inception and wanted.train and wanted.batch_size < 2:
        raise ModelLookupError(
            "inception_v3 normalises over the batch: it needs a batch of at least 2 to train"
        )
    x = torch.randn(wanted.batch_size, 3, size, size)
    model = models.get_model(name, weights=None, **options)
    return ModelCase(model, (x, _labels(_CLASSES, wanted)), loss)


def _segmentation_case(models: ModuleType, name: str, wanted: _Wanted) -> ModelCase:
    if name.startswith("deeplabv3") and wanted.train and wanted.batch_size < 2:
        raise ModelLookupError(f"{name} normalises over the batch: it needs a batch of at least 2 to train")
    size = wanted.image_size or IMAGE_SIZE
    model = models.get_model(name, weights=None, weights_backbone=None)
    x = torch.randn(wanted.batch_size, 3, size, size)
    target = torch.randint(21, (wanted.batch_size, size, size))
    return ModelCase(model, (x, target), segmentation_loss)


def _labels(classes: int, wanted: _Wanted) -> torch.Tensor:
    return torch.randint(classes, (wanted.batch_size,))


def auxiliary_loss(outputs: Any, target: torch.Tensor, *, weight: float) -> torch.Tensor:
    """Cross entropy of a model with auxiliary classifiers, as in the papers of GoogLeNet and Inception v3.

    Args:
        outputs: a named tuple whose first field is the main classifier's; or that one's logits alone.
        target: class labels.
        weight: of each auxiliary classifier's loss.

    Returns:
        The weighted sum.
    """
    if isinstance(outputs, torch.Tensor):
        return F.cross_entropy(outputs, target)
    main, *auxiliary = outputs
    loss = F.cross_entropy(main, target)
    for each in auxiliary:
        if each is not None:
            loss = loss + weight * F.cross_entropy(each, target)
    return loss


def segmentation_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a segmentation model; its auxiliary classifier, if any, counts half.

    Args:
        outputs: a mapping with ``out`` and perhaps ``aux``.
        target: a class for every pixel.

    Returns:
        The weighted sum.
    """
    loss = F.cross_entropy(outputs["out"], target)
    return loss + 0.5 * F.cross_entropy(outputs["aux"], target) if "aux" in outputs else loss


# transformers


def _transformers_case(name: str, wanted: _Wanted) -> ModelCase:
    architecture = name.removesuffix("-base")
    if architecture not in _ARCHITECTURES:
        raise _unknown(name, "transformers", _ARCHITECTURES)
    _require_package("transformers")
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it when it is there
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(architecture)
    if name == architecture:
        for key, value in _SMALL.items():
            if hasattr(config, key):
                setattr(config, key, value)
    task = _ARCHITECTURES[architecture]
    if task == "see":
        config.image_size = wanted.image_size or IMAGE_SIZE
        x = torch.randn(wanted.batch_size, 3, config.image_size, config.image_size)
        model = transformers.AutoModelForImageClassification.from_config(config)
        return ModelCase(model, (x, _labels(config.num_labels, wanted)), logits_loss)
    x = torch.randint(2, config.vocab_size, (wanted.batch_size, wanted.tokens))
    if task == "generate":
        config.use_cache = False
        model = transformers.AutoModelForCausalLM.from_config(config)
        return ModelCase(model, (x, torch.randint(config.vocab_size, tuple(x.shape))), logits_loss)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    return ModelCase(model, (x, _labels(config.num_labels, wanted)), logits_loss)


def logits_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the logits of a transformers model.

    Args:
        outputs: with a field ``logits``, whose last dimension are the classes.
        target: class labels, one for each row of the logits.

    Returns:
        The mean.
    """
    return F.cross_entropy(outputs.logits.flatten(0, -2), target.flatten())


# torch.nn and files


def _torch_case(name: str, wanted: _Wanted) -> ModelCase:
    sizes: dict[str, dict[str, int]] = {
        "transformer": {},
        "transformer-1": {"num_encoder_layers": 1, "num_decoder_layers": 1, "nhead": 1},
    }
    if name not in sizes:
        raise _unknown(name, "torch", sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # of no use in training
        model = nn.Transformer(**sizes[name])  # type: ignore[arg-type]
    source = torch.randn(_SOURCE_TOKENS, wanted.batch_size, _TRANSFORMER_WIDTH)
    target, answer = (torch.randn(_TARGET_TOKENS, wanted.batch_size, _TRANSFORMER_WIDTH) for _ in range(2))
    return ModelCase(model, (source, target, answer), F.mse_loss)


def _file_case(name: str, wanted: _Wanted) -> ModelCase:
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
        return ModelCase(made, (x, _labels(_CLASSES, wanted)), F.cross_entropy)
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


# optimizers

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rprop": (torch.optim.Rprop, {}),
}
OPTIMIZERS = tuple(_OPTIMIZERS)
"""Names for :func:`optimizer_by_name`."""


def optimizer_by_name(
    name: str, parameters: Iterable[nn.Parameter], lr: float = 0.1
) -> torch.optim.Optimizer:
    """Make an optimizer of ``torch.optim`` with its default flags.

    Args:
        name: one of :data:`OPTIMIZERS`.
        parameters: what it trains.
        lr: learning rate.

    Returns:
        The optimizer.

    Raises:
        ModelLookupError: when the name is unknown.
    """
    if name not in _OPTIMIZERS:
        raise ModelLookupError(f"unknown optimizer {name!r}; one of {', '.join(OPTIMIZERS)}")
    kind, options = _OPTIMIZERS[name]
    return kind([each for each in parameters if each.requires_grad], lr=lr, **options)  # type: ignore[call-arg]
