"""Builds torchvision's models for classification, segmentation and video, with random weights."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from olla_fx.errors import ModelLookupError
from olla_fx.models.case import (
    CLASSES,
    IMAGE_SIZE,
    LossFunction,
    ModelCase,
    Wanted,
    labels,
    require_package,
    unknown,
)

_INCEPTION_SIZE = 299
_VIDEO_SIZES = {
    "r3d_18": (1, 112), "mc3_18": (1, 112), "r2plus1d_18": (1, 112), "s3d": (16, 224),
    "mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224),
    "swin3d_t": (16, 224), "swin3d_s": (16, 224), "swin3d_b": (16, 224),
}  # fmt: skip
"""Frames and image size of one video."""

_operator_library: torch.library.Library | None = None
"""Holds the declared operators; they vanish with it."""


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled half does not fit the installed torch.

    torchvision's wheels on the package index are built for CUDA. Under a torch for CPUs its library does
    not load, and the import ends at two operators that only detection models use. Only then are these
    declared, without a body, and torchvision imported again: its other models are plain Python.

    Returns:
        The module.

    Raises:
        ModelLookupError: if torchvision is not installed.
    """
    global _operator_library
    require_package("torchvision")
    try:
        return importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        if _operator_library is not None:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _operator_library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _operator_library.define(schema)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")


def torchvision_case(name: str, wanted: Wanted) -> ModelCase:
    """Build a model of torchvision.

    Args:
        name: without its family.
        wanted: the sizes.

    Returns:
        Model, example and loss.

    Raises:
        ModelLookupError: if the name is unknown or the package is not installed.
    """
    models = import_torchvision().models
    images, segmentation, videos = (
        set(models.list_models(module=module)) for module in (models, models.segmentation, models.video)
    )
    if name in images:
        return _image_case(models, name, wanted)
    if name in segmentation:
        return _segmentation_case(models, name, wanted)
    if name in videos:
        frames, size = _VIDEO_SIZES.get(name, (16, IMAGE_SIZE))
        size = wanted.image_size or size
        x = torch.randn(wanted.batch_size, 3, frames, size, size)
        return ModelCase(models.get_model(name, weights=None), (x, labels(400, wanted)), F.cross_entropy)
    if name in set(models.list_models()):
        raise ModelLookupError(
            f"torchvision model {name!r} is quantised or takes more than images and class labels (detection, "
            "optical flow); build it in a file of your own and pass path/to/file.py:factory"
        )
    raise unknown(name, "torchvision", images | segmentation | videos)


def _image_case(models: ModuleType, name: str, wanted: Wanted) -> ModelCase:
    inception = name == "inception_v3"
    size = wanted.image_size or (_INCEPTION_SIZE if inception else IMAGE_SIZE)
    options: dict[str, Any] = {}
    loss: LossFunction = F.cross_entropy
    if name in ("googlenet", "inception_v3"):
        # Their initialisation takes half a minute, and only real training needs it.
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
    return ModelCase(model, (x, labels(CLASSES, wanted)), loss)


def _segmentation_case(models: ModuleType, name: str, wanted: Wanted) -> ModelCase:
    if name.startswith("deeplabv3") and wanted.train and wanted.batch_size < 2:
        raise ModelLookupError(f"{name} normalises over the batch: it needs a batch of at least 2 to train")
    size = wanted.image_size or IMAGE_SIZE
    model = models.get_model(name, weights=None, weights_backbone=None)
    x = torch.randn(wanted.batch_size, 3, size, size)
    target = torch.randint(21, (wanted.batch_size, size, size))
    return ModelCase(model, (x, target), segmentation_loss)


def auxiliary_loss(outputs: Any, target: torch.Tensor, *, weight: float) -> torch.Tensor:
    """Add up cross entropies of all classifiers, as in the papers of GoogLeNet and Inception v3.

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
    for logits in auxiliary:
        if logits is not None:
            loss = loss + weight * F.cross_entropy(logits, target)
    return loss


def segmentation_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Compute a segmentation model's cross entropy; an auxiliary classifier counts half.

    Args:
        outputs: a mapping with ``out`` and perhaps ``aux``.
        target: a class for every pixel.

    Returns:
        The weighted sum.
    """
    loss = F.cross_entropy(outputs["out"], target)
    return loss + 0.5 * F.cross_entropy(outputs["aux"], target) if "aux" in outputs else loss
