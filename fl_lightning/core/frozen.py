"""Constants of a net, which training never changes: frozen parameters, and buffers of modules kept in eval mode."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ensure
from fl_lightning.core.forward import modes_kept

CHUNK = 2**20
"""Numbers that are hashed at once."""


def moving_buffers(net: nn.Module) -> list[str]:
    """Returns the names of the buffers that training may change.

    In a net with frozen parameters, the buffers of modules that stay in eval mode and hold no trained parameter are not
    among them.
    """
    names = [name for name, _ in net.named_buffers()]
    if all(p.requires_grad for p in net.parameters()):
        return names
    with modes_kept(net):
        if not net.training:  # in a net in train mode, modules in eval mode stay there
            net.train()
        return [name for name in names if _moves(net.get_submodule(name.rpartition(".")[0]))]


def _moves(owner: nn.Module) -> bool:
    return owner.training or any(p.requires_grad for p in owner.parameters(recurse=False))


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
    own = constants(net)
    shapes = [{(name, value.shape) for name, value in side.items()} for side in (own, values)]
    wrong = sorted(name for name, _ in shapes[0] ^ shapes[1])
    ensure(
        not wrong,
        f"{key} does not fit {type(net).__name__}: its frozen '{wrong and wrong[0]}' is missing, unknown or of another "
        "shape; take the net of the run",
    )
    for name, constant in own.items():
        constant.copy_(values[name])


def digest(values: Mapping[str, Tensor]) -> str:
    """Returns a hash of names, shapes and values, the same in each precision that holds them; "" if there are none."""
    found = hashlib.sha256()
    for name, value in sorted(values.items()):
        found.update(f"{name} {tuple(value.shape)}".encode())
        for part in torch.split(value.reshape(-1), CHUNK):
            found.update(part.cpu().double().numpy().data)
    return found.hexdigest()[:32] if values else ""
