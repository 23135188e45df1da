"""The exceptions that ``olla_fx`` raises on purpose; all derive from :class:`OllaError`."""

from __future__ import annotations

import pickle

from olla_solvers.errors import OllaError

__all__ = [
    "ArenaBusyError",
    "ArenaUnavailableError",
    "BackwardError",
    "BudgetError",
    "BufferMemoryError",
    "CaptureError",
    "DeviceError",
    "HostMemoryError",
    "MissingPackageError",
    "ModelLookupError",
    "NotPicklableError",
    "OllaError",
    "RecordingError",
    "StepInputError",
    "StepModeError",
    "SwapError",
    "UnsupportedOptimizerError",
]


class ArenaBusyError(OllaError, RuntimeError):
    """A region cannot be entered because it, or another one on this thread, is being run."""


class ArenaUnavailableError(OllaError, RuntimeError):
    """There is no native allocator in this process: it could not be built, or is disabled."""


class CaptureError(OllaError):
    """The model's step cannot be captured as one graph: says which part of the model and why."""


class NumberNotLateError(CaptureError):
    """A step cannot be captured with a number as its input: the number's value decides more than results.

    Attributes:
        names: of the numbers that are known to be at fault; empty if any may be.
        is_lasting: False if it may well be possible for other values.
    """

    def __init__(self, names: tuple[str, ...], reason: str, *, is_lasting: bool = True) -> None:
        """Say why; it is caught, and the step captured with constants."""
        super().__init__(f"{', '.join(names) or 'a number'} cannot be an input of the graph: {reason}")
        self.names = names
        self.is_lasting = is_lasting


class UnsupportedOptimizerError(CaptureError):
    """The optimizer cannot be captured; names one that can."""


class StepInputError(OllaError, ValueError):
    """A step was called with inputs other than the ones it was planned for."""


class StepModeError(OllaError, RuntimeError):
    """A step was called while the model is in the wrong mode."""


class BackwardError(OllaError, RuntimeError):
    """A backward of a planned module cannot run: says why, and what to do."""


class NotPicklableError(OllaError, pickle.PicklingError):
    """A planned module holds something that no other process could find again."""


class BudgetError(OllaError, MemoryError):
    """No plan of a step was found within the memory budget: says what is needed, where, and what would help.

    Attributes:
        needed_bytes: of the smallest plan that was found.
        is_proven: True if none within the budget exists, of the step after its rewrites and without results
            that are written over arguments.
    """

    def __init__(self, text: str, needed_bytes: int, *, is_proven: bool) -> None:
        """Say how far it is from the budget."""
        super().__init__(text)
        self.needed_bytes = needed_bytes
        self.is_proven = is_proven


class BufferMemoryError(OllaError, MemoryError):
    """The device has not enough free memory for the planned buffer."""


class HostMemoryError(OllaError, MemoryError):
    """The host has not enough memory, page-locked for CUDA, for the arrays that are to wait there."""


class SwapError(OllaError, ValueError):
    """An array was to wait on the host that cannot, or not then: says which and why."""


class DeviceError(OllaError, RuntimeError):
    """A device was asked for that is not there."""


class RecordingError(OllaError, ValueError):
    """A recorded stream of requests shows no iteration."""


class MissingPackageError(OllaError, ImportError):
    """A package that an integration needs is not installed."""

    def __init__(self, package: str, install: str, error: ImportError) -> None:
        """Name the command that installs it.

        Args:
            package: the one that is imported.
            install: what pip is to install.
            error: the import's.
        """
        super().__init__(
            f"{package} cannot be imported ({error}): pip install 'olla-fx[integrations]', or pip install "
            f"{install}"
        )


class ModelLookupError(OllaError, ValueError):
    """A model named on the command line cannot be built."""
