"""Models with two layers whose forward is given, in the caller's own loop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import Written


def two_layers(forward: Callable[..., Any], **parts: Any) -> Written:
    """Return a model with the layers ``first`` and ``second`` whose forward is given."""
    return Written(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6), **parts)


def train_written(
    forward: Callable[..., Any],
    use: Callable[[Any, nn.Module], object],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **parts: Any,
) -> OwnLoop:
    """Plan a model with a given forward, and use its answers in the same way as eager's; compare gradients.

    Args:
        forward: of the model.
        use: called with an answer and its model; runs backward.
        context: what forward runs in.
        parts: of the model.
    """
    pair = OwnLoop(two_layers(forward, **parts), torch.randn(4, 6))
    for _ in range(3):
        x = torch.randn(4, 6)

        def loop(called: Callable[..., Any], model: nn.Module, x: torch.Tensor = x) -> None:
            with context():
                answer = called(x)
            use(answer, model)

        pair.run_loop(loop)
    return pair
