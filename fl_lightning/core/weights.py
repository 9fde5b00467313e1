"""Reading and loading of weights, with one line for each error."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import UserError, ensure
from fl_lightning.core.files import FROZEN, WRONG, fault
from fl_lightning.core.frozen import digest

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Suffixes of the names of BatchNorm's buffers."""


def read(path: str, key: str) -> Any:
    """Returns the content of a file written by ``torch.save``.

    Args:
        path: The file.
        key: The setting that names it, for the error message.

    Raises:
        UserError: If it is missing or unreadable.
    """
    ensure(Path(path).is_file(), f"{key} = {path}: no such file; give a state_dict saved by torch.save")
    ensure(fault(Path(path)) != WRONG, f"{key} = {path}: damaged ({WRONG}); take another copy")  # a run's checkpoint
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{key} = {path}: not readable ({type(error).__name__}); give a state_dict saved by torch.save"
        ) from None


def with_constants(content: Mapping[str, Any], path: Path, key: str) -> dict[str, Tensor]:
    """Returns the state_dict of a checkpoint with the frozen parameters of its net, which lie in a file next to it.

    Args:
        content: The checkpoint.
        path: Its file.
        key: The setting that names it, for the error message.

    Raises:
        UserError: If that file is missing, unreadable or of another net.
    """
    if not content.get("frozen"):
        return dict(content["state_dict"])
    file = path.parent / FROZEN
    ensure(file.is_file(), f"{key} = {path}: its frozen parameters, {FROZEN}, are not next to it; copy both")
    constants = read(str(file), key)
    fits = isinstance(constants, Mapping) and all(isinstance(value, Tensor) for value in constants.values())
    ensure(
        fits and digest(constants) == content["frozen"],
        f"{key} = {path}: {FROZEN} next to it holds the frozen parameters of another net; copy both",
    )
    return {**content["state_dict"], **{f"net.{name}": value for name, value in constants.items()}}


def load(net: nn.Module, weights: Mapping[str, Tensor], key: str, head: str | tuple[str, ...] | None = None) -> None:
    """Loads tensors by name into ``net``.

    Args:
        net: The network.
        weights: Its state_dict, or with ``head`` that of a network with other normalization layers and another head.
        key: The setting that names them, for the error message.
        head: Prefix of the head's names, or several: a head of another shape, or that is not there, is not loaded, nor
            are statistics that ``net`` does not keep.

    Raises:
        UserError: If anything else is missing, unknown or of another shape.
    """
    own = {name: value.shape for name, value in net.state_dict().items()}
    given = {name: value.shape for name, value in weights.items()}
    if head is not None:
        given = {name: shape for name, shape in given.items() if name in own or not name.endswith(STATISTICS)}
        bodies = [{n: s for n, s in side.items() if not n.startswith(head)} for side in (own, given)]
        if any(name.startswith(head) for name, _ in own.items() ^ given.items()):
            own, given = bodies
    if wrong := sorted({name for name, _ in own.items() ^ given.items()}):
        raise UserError(
            f"{key} does not fit {type(net).__name__}: '{wrong[0]}' is missing, unknown or of another shape "
            f"({len(wrong)} such names); take the net that the weights were saved from"
        )
    net.load_state_dict({name: weights[name] for name in given}, strict=False)


def initialize(net: nn.Module, source: str | Mapping[str, Any]) -> None:
    """Loads a state_dict, or a file that holds one (of the net, or of a checkpoint of this package), into ``net``.

    Raises:
        UserError: If the file is missing or unreadable, or names and shapes do not fit the net.
    """
    key = "model.init_weights"
    load(net, named(source, key, net.state_dict().keys()), key)


def named(source: str | Mapping[str, Any], key: str, names: Collection[str]) -> dict[str, Tensor]:
    """Returns the entries of a state_dict, or of one in a file, by the names of a net: a prefix "net." is removed.

    Args:
        source: A file or state_dict, as for `initialize`.
        key: The setting that names it, for the error message.
        names: The net's names.
    """
    found = read(source, key) if isinstance(source, str) else source
    if isinstance(found, Mapping) and isinstance(source, str) and "state_dict" in found:
        found = with_constants(found, Path(source), key)
    found = found.get("state_dict", found) if isinstance(found, Mapping) else {}
    given = {name: torch.as_tensor(value) for name, value in found.items()}
    if not given.keys() & names:
        given = {name.removeprefix("net."): value for name, value in given.items()}
    return given
