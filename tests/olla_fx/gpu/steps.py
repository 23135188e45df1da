"""Small steps on a GPU."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import optim

import olla_fx
from tests.olla_fx.helpers import SmallNet

SGD = partial(optim.SGD, lr=0.1, momentum=0.9, foreach=False)


def batch_on(device):
    return torch.zeros(4, 3, 16, 16, device=device), torch.zeros(4, dtype=torch.long, device=device)


def whole_step(device, make_optimizer=SGD, **options):
    model = SmallNet().to(device)
    batch = batch_on(device)
    optimizer = make_optimizer(model.parameters())
    step = olla_fx.optimize(
        model, batch, loss_fn=F.cross_entropy, optimizer=optimizer, solver="none", **options
    )
    return step, batch, optimizer
