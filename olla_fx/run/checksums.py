"""Checksums of tensors' memory, for changes that autograd's version counters do not see.

``.data``, a NumPy array in the same memory or a rank's collective change values without counting. The words
of a tensor's memory are coefficients of a linear function over the integers modulo 2**64 with random odd
weights, which few changes leave as it is: neither a permutation nor a change of all signs does.
"""

from __future__ import annotations

import functools

import torch

from olla_fx.capture import TensorSpec

_WORD_BYTES = 8
_WORDS = 1 << 16
"""Weights that are kept; longer tensors take them piece by piece."""
_PIECE_FACTOR = 0x5851F42D4C957F2D


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that tells a tensor's present memory from a changed one.

    Args:
        tensor: strided; on any device but meta.

    Returns:
        A tensor without dimensions on the same device, so that nothing waits for it.
    """
    words = _words_of(tensor.detach())
    weights, count = _weights(tensor.device), words.numel()
    if count <= _WORDS:
        return _product(words, weights[:count])
    total = _product(words[:_WORDS], weights)
    for start in range(_WORDS, count, _WORDS):
        piece = words[start : start + _WORDS]
        total = total * _PIECE_FACTOR + _product(piece, weights[: piece.numel()])
    return total


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The words in which a tensor lies; of a copy where most of its memory is not its own."""
    if not tensor.is_contiguous():
        span = 1 + TensorSpec.of(tensor).last_offset
        whole = tensor.numel() and span <= 2 * tensor.numel()
        tensor = tensor.as_strided((span,), (1,)) if whole else tensor.contiguous()
    octets = tensor.view(-1).view(torch.uint8)
    rest = octets.numel() % _WORD_BYTES
    if rest:
        octets = torch.nn.functional.pad(octets, (0, _WORD_BYTES - rest))
    elif octets.storage_offset() % _WORD_BYTES:
        octets = octets.clone()
    return octets.view(torch.int64)


def _product(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # There is no dot product of integers on CUDA.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_WORDS,), dtype=torch.int64, generator=source, device="cpu")
    return (numbers | 1).to(device)
