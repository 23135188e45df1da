"""Keeps networks in files of safetensors: weights, with width and rounds as metadata."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from olla_fx.deep_q.network import QNetwork
from olla_solvers.errors import OptionError


def save_network(network: QNetwork, path: str | Path) -> None:
    """Write a network into a file.

    Args:
        network: which.
        path: of the file.

    Raises:
        OptionError: if safetensors is not installed.
    """
    _require_safetensors()
    from safetensors.torch import save_file

    weights = {name: weight.detach().contiguous() for name, weight in network.state_dict().items()}
    metadata = {"width": str(network.width), "rounds": str(network.rounds)}
    save_file(weights, str(path), metadata=metadata)


def load_network(path: str | Path) -> QNetwork:
    """Read a network.

    Args:
        path: of a file of :func:`save_network`.

    Raises:
        OptionError: if safetensors is not installed, or the file holds no such network.
        FileNotFoundError: if there is no such file.
    """
    _require_safetensors()
    from safetensors import SafetensorError, safe_open

    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {str(path)!r} with a network")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            network = QNetwork(int(metadata["width"]), int(metadata["rounds"]))
            network.load_state_dict({name: file.get_tensor(name) for name in network.state_dict()})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise OptionError(f"{path} holds no network of olla_fx.deep_q: {error}") from error
    return network


def _require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise OptionError(
            "networks are kept in files of safetensors, which is not installed: "
            "pip install 'olla-fx[learning]'"
        )
