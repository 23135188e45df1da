"""Random draws as operators of a graph: a generator's state, and what draws again what was drawn before.

``random_state`` and ``set_random_state`` read and set the state of a device's generator, by which a graph
does what eager's checkpoints do.

**Drawn again.** Of an operator that draws, :data:`DRAWN_AGAIN` has one that is given a state beside the
arguments: it sets the generator to that state, runs the operator, and puts the generator back as it was. With
the state from before the first run it returns what the first run has drawn. A CUDA graph can neither read nor
set a state.

**A dropout's mask** on the CPU is drawn by an operator of its own, which is told the shape alone, so that it
can be drawn again without the tensor that it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from olla_fx.operators import define_new
from olla_fx.torch_compat import overload_name, plain_name, schema_of

aten = torch.ops.aten

AGAIN = "_drawn_again"
"""How the names of operators end that draw again."""

FROM_STATE = ("generator_state", "generator_device")
"""What these are given in front of the arguments of the first run."""

_RANDOM = (torch.Tag.nondeterministic_seeded,)
"""Keeps an operator in order among random draws."""


def _read_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


_CPU_STATE_BYTES = torch.get_rng_state().numel()
_CUDA_STATE_BYTES = 16
"""The seed and the offset."""


def state_bytes(device: torch.device) -> int:
    """Return the bytes of the state of a device's generator, which lie in the host's memory."""
    return _CUDA_STATE_BYTES if device.type == "cuda" else _CPU_STATE_BYTES


random_state = define_new("random_state", "(Device device) -> Tensor", _read_state, _fake_state, _RANDOM)
set_random_state = define_new(
    "set_random_state", "(Tensor state, Device device) -> ()", _set_state, lambda *_: None, _RANDOM
)


@contextmanager
def _from_state(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Let a device's generator begin from a state, and put it back afterwards."""
    before = _read_state(device)
    _set_state(state, device)
    try:
        yield
    finally:
        _set_state(before, device)


def drawn_again(original: Any) -> Any:
    """Define what draws again: an operator with a state and a device in front of another's arguments.

    Args:
        original: draws by a device's own generator, and writes to none of its arguments.
    """
    name, overload = f"{plain_name(original)}{AGAIN}", overload_name(original)
    name, schema = name if overload == "default" else f"{name}.{overload}", str(schema_of(original))

    def run(state: torch.Tensor, device: torch.device, /, *arguments: Any, **named: Any) -> Any:
        with _from_state(state, device):
            return original(*arguments, **named)

    def fake(state: torch.Tensor, device: torch.device, /, *arguments: Any, **named: Any) -> Any:
        return original(*arguments, **named)

    state, generator = FROM_STATE
    arguments = schema[schema.index("(") + 1 :]
    return define_new(name, f"(Tensor {state}, Device {generator}, {arguments}", run, fake)


def _draw_mask(size: Sequence[int], stride: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device).bernoulli_(1.0 - p)


def _fake_mask(size: Sequence[int], stride: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device)


dropout_mask = define_new(
    "dropout_mask",
    "(SymInt[] size, SymInt[] stride, float p, Device device) -> Tensor",
    _draw_mask,
    _fake_mask,
    _RANDOM,
)
"""What a dropout keeps: a truth value for each element."""


DRAWN_AGAIN: Mapping[Any, Any] = {
    original: drawn_again(original)
    for original in (
        dropout_mask,
        aten.native_dropout.default,
        aten.bernoulli.default,
        aten.bernoulli.p,
        aten.rand.default,
        aten.randn.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.exponential.default,
        aten.normal_functional.default,
        aten.uniform.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
    )
}
"""Operators that draw, each with the one that draws again."""
