"""Reading and loading of weights, with one line for each error; the constants of a net."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import UserError, ensure, folded
from fl_lightning.core.files import FROZEN, WRONG, fault
from fl_lightning.core.forward import modes_kept

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
    expected = {name: value.shape for name, value in net.state_dict().items()}
    loaded = {name: value.shape for name, value in weights.items()}
    if head is not None:
        loaded = {name: shape for name, shape in loaded.items() if name in expected or not name.endswith(STATISTICS)}
        bodies = [{n: s for n, s in shapes.items() if not n.startswith(head)} for shapes in (expected, loaded)]
        if any(name.startswith(head) for name, _ in expected.items() ^ loaded.items()):
            expected, loaded = bodies
    if wrong := sorted({name for name, _ in expected.items() ^ loaded.items()}):
        raise UserError(
            f"{key} does not fit {type(net).__name__}: '{wrong[0]}' is missing, unknown or of another shape "
            f"({len(wrong)} such names); take the net that the weights were saved from"
        )
    net.load_state_dict({name: weights[name] for name in loaded}, strict=False)


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

    Raises:
        UserError: If the file is missing or unreadable, or an entry is no tensor.
    """
    content = read(source, key) if isinstance(source, str) else source
    if isinstance(content, Mapping) and isinstance(source, str) and "state_dict" in content:
        content = with_constants(content, Path(source), key)
    state = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    try:
        tensors = {str(name): torch.as_tensor(value) for name, value in state.items()}
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{key}: not all of its entries are tensors ({folded(', '.join(map(str, state)), 60)}); give a state_dict "
            "alone, saved by torch.save"
        ) from None
    if not tensors.keys() & names:
        tensors = {name.removeprefix("net."): value for name, value in tensors.items()}
    return tensors


CHUNK = 2**20
"""Numbers that are hashed at once."""


def moving_buffers(net: nn.Module) -> list[str]:
    """Returns the names of the buffers that training may change.

    Buffers that ``state_dict()`` leaves out are constants, such as the numbers of positions. In a net with frozen
    parameters, the buffers of modules that stay in eval mode and hold no trained parameter are not among them either.
    """
    state = net.state_dict(keep_vars=True)
    names = [name for name, _ in net.named_buffers() if name in state]
    if all(p.requires_grad for p in net.parameters()):
        return names
    with modes_kept(net):
        if not net.training:  # in a net in train mode, modules in eval mode stay there
            net.train()
        owners = [(name, net.get_submodule(name.rpartition(".")[0])) for name in names]
        return [
            n
            for n, module in owners
            if module.training or any(p.requires_grad for p in module.parameters(recurse=False))
        ]


def unregistered(net: nn.Module) -> list[str]:
    """Returns the paths of lists and dicts in a net whose layers or parameters would train if torch saw them there."""
    registered, paths = {id(p) for p in net.parameters()}, list[str]()
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            held = [p for x in entries if isinstance(x, nn.Module) for p in x.parameters()]
            held += [x for x in entries if isinstance(x, nn.Parameter)]
            if any(p.requires_grad and id(p) not in registered for p in held):
                paths.append(f"{name}.{key}".lstrip("."))
    return paths


def constants(net: nn.Module) -> dict[str, Tensor]:
    """Returns the entries of a net's ``state_dict()`` that training does not change; empty if no parameter is frozen.

    The tensors share the net's memory.
    """
    if all(p.requires_grad for p in net.parameters()):
        return {}
    moving, state = set(moving_buffers(net)), net.state_dict(keep_vars=True)
    return {name: v.detach() for name, v in state.items() if not v.requires_grad and name not in moving}


def load_constants(net: nn.Module, values: Mapping[str, Tensor], key: str) -> None:
    """Writes the values of a net's `constants` into it.

    Args:
        net: The net.
        values: The values by name.
        key: The setting that names them, for the error message.

    Raises:
        UserError: If one is missing, unknown or of another shape; nothing is written then.
    """
    targets = constants(net)
    shapes = [{(name, value.shape) for name, value in side.items()} for side in (targets, values)]
    wrong = sorted(name for name, _ in shapes[0] ^ shapes[1])
    ensure(
        not wrong,
        f"{key} does not fit {type(net).__name__}: its frozen '{wrong and wrong[0]}' is missing, unknown or of another "
        "shape; take the net of the run",
    )
    for name, constant in targets.items():
        constant.copy_(values[name])


def load_buffers(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Writes values of a net's buffers into it, by name; one that has another shape, as a cache may, stays."""
    for name, buffer in net.named_buffers():
        value = values.get(name, buffer).to(buffer)
        if value.shape == buffer.shape and not torch.equal(value, buffer):  # an expanded one takes no copy
            buffer.copy_(value)


def digest(values: Mapping[str, Tensor]) -> str:
    """Returns a hash of names, shapes and values, the same in each precision that holds them; "" if there are none."""
    hasher = hashlib.sha256()
    for name, value in sorted(values.items()):
        hasher.update(f"{name} {tuple(value.shape)}".encode())
        for part in torch.split(value.reshape(-1), CHUNK):
            hasher.update(part.cpu().double().numpy().data)
    return hasher.hexdigest()[:32] if values else ""
