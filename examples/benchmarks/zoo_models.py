"""Names and builds the models of the zoo.

They are torchvision's classification, segmentation and video models, and the architectures of
:mod:`zoo_architectures`: as they are, and those of texts once more with each mask of :mod:`zoo_transformers`.
"""

from __future__ import annotations

import torch
from zoo_architectures import ARCHITECTURES
from zoo_transformers import MASKS, takes_mask, transformers_case

from olla_fx.models import ModelCase, build_model, import_torchvision

MASKED = {f"transformers, mask {mask}": mask for mask in MASKS}
"""Families of texts with masks, and the mask of each."""

FAMILIES = ("classification", "segmentation", "video", "transformers", *MASKED)
"""The first three are torchvision's; the last ones are texts with masks of ones, padded right and left."""

SEED = 0
IMAGE_SIZE = 64
IMAGE_SIZES = {
    "inception_v3": 299,  # its auxiliary classifier needs that much
    "maxvit_t": 224,  # cuts its feature maps into windows of 7
    "mvit_v1_b": 224,  # embeds positions of this size alone
    "mvit_v2_s": 224,
    "s3d": 224,  # pools over 7 by 7 at the end
    "vit_h_14": 56,  # cuts images into patches of 14
}
"""Sizes of models that cannot take images of :data:`IMAGE_SIZE`."""


def names_of(family: str) -> list[str]:
    """Return the names of a family's models."""
    if family == "transformers":
        return list(ARCHITECTURES)
    if family in MASKED:
        return [name for name in ARCHITECTURES if takes_mask(name)]
    models = import_torchvision().models
    module = {"classification": models, "segmentation": models.segmentation, "video": models.video}[family]
    return list(models.list_models(module=module))


def build(family: str, name: str, batch: int) -> ModelCase:
    """Build a model of the zoo in training mode, always with the same weights and inputs."""
    torch.manual_seed(SEED)
    if family == "transformers" or family in MASKED:
        return transformers_case(name, MASKED.get(family), batch)
    size = IMAGE_SIZES.get(name, IMAGE_SIZE)
    return build_model(f"torchvision:{name}", batch_size=batch, image_size=size)
