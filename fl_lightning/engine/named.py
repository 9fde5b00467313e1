"""The arguments of a local step as named tensors, and back."""

from collections.abc import Mapping

from torch import Tensor

from fl_lightning.core import State
from fl_lightning.engine.base import COLUMNS, Carry, Fixed


def tensors_of(fixed: Fixed) -> dict[str, Tensor]:
    """Returns the tensors of the arguments that stay the same, by name."""
    columns = {name: getattr(fixed.ctx, name) for name in (*COLUMNS, "class_counts")}
    return {
        **prefixed("received", fixed.received),
        **{f"teacher.{i}": v for i, v in enumerate(fixed.teachers)},
        **{f"constant.{i}": v for i, v in enumerate(fixed.constants)},
        **({} if fixed.start is fixed.received.w else {"start": fixed.start}),
        **prefixed("ctx", {name: v for name, v in columns.items() if v is not None}),
    }


def prefixed(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def below(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names have a prefix, without it."""
    return {name.removeprefix(f"{prefix}."): v for name, v in named.items() if name.startswith(f"{prefix}.")}


def tensors_of_carry(carry: Carry) -> dict[str, Tensor]:
    """Returns the tensors of a carry by name."""
    return {"w": carry.w, "loss": carry.loss, **prefixed("state", carry.state)}


def carry_of(named: Mapping[str, Tensor]) -> Carry:
    """Returns the carry of which `tensors_of_carry` returns the tensors; other names are ignored."""
    return Carry(named["w"], State(below("state", named)), named["loss"])
