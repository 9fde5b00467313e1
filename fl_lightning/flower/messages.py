"""The messages between server and nodes, and the versions of a client's state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias
from zlib import crc32

from torch import Tensor

from fl_lightning.core import ClientContext, UserError

Value: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Message:
    """A message to a node, or its reply.

    Attributes:
        tensors: Named tensors on the CPU, by record. A message to a node has ``down``, the state that the algorithm
            sends; a reply has ``up.<k>``, the upload of client k.
        values: Plain values, by record. A message to a node has ``round``, and ``client.<k>`` for each of its clients
            that trains; a reply has ``client.<k>``.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Mapping[str, Value]]


class NodeLost(UserError):
    """A node is not there, or does not reply."""


Send: TypeAlias = Callable[[Mapping[int, Message]], Mapping[int, Message | UserError]]
"""Carries messages to nodes (by their numbers, from 0) and returns their replies, or why a node has none."""

NOT_SENT = {"flat", "class_counts", "draws", "logs", "drawn"}
"""What a node makes itself of a context, or has no use for, since its server has rounds."""
CONTEXT = tuple(field.name for field in fields(ClientContext) if field.name not in NOT_SENT)
"""Attributes of a client's context that go over the wire."""


def checksum(*tensors: Tensor) -> int:
    """Returns the CRC-32 of the tensors' bytes."""
    found = 0
    for tensor in tensors:
        found = crc32(tensor.detach().cpu().numpy().tobytes(), found)
    return found


# The version of a client's state is the CRC-32 of its content as 8 hexadecimal digits; "" before first contact


def version_of(state: Mapping[str, Tensor]) -> str:
    """Returns the version of a state."""
    return f"{checksum(*(state[name] for name in sorted(state))):08x}"


def row_of(version: str, like: Tensor) -> Tensor:
    """Returns a version as numbers ``(3,)``, exact in float32, which the server keeps as the client's state."""
    return like.new_tensor([1, *divmod(int(version, 16), 1 << 16)])


def version_in(row: Tensor) -> str:
    """Returns the version in a row of `row_of`; "" for zeros."""
    known, high, low = map(int, row.tolist())
    return f"{(high << 16) + low:08x}" if known else ""
