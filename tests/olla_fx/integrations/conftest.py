"""Imports torchvision first: transformers and torchmetrics do, and it may not fit the installed torch."""

from olla_fx.models import import_torchvision

import_torchvision()
