"""The state of a run, which a round replaces, and its checkpoint: all that a run needs to go on as if never stopped."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from fl_lightning.core import (
    NonNegativeInt,
    State,
    UserError,
    accumulator_dtype,
    earlier,
    ensure,
    files,
    fits,
    weights,
)
from fl_lightning.engine import is_name
from fl_lightning.trainer.aggregation.noise import BYTES
from fl_lightning.trainer.participation.faults import Failures, counted
from fl_lightning.trainer.settings import Kind

T = TypeVar("T")
ROUNDS = 5
"""Rounds whose norms are kept."""
Norms = Sequence[Mapping[str, Tensor]]
"""Norms of the server's vectors, after each of the last rounds."""


def by_key(objects: Sequence[T]) -> dict[str, T]:
    """Returns objects by the key of their state: the class, numbered from the second object of the same class on."""
    names = [type(x).__name__ for x in objects]
    return {f"{name}.{n}" if n else name: x for name, n, x in zip(names, earlier(names), objects, strict=True)}


def norms(server: State) -> dict[str, Tensor]:
    """Returns the norm of each of the server's vectors ``(d,)``, as scalars on its device: nothing waits for them.

    Masks and integers are no vectors.
    """
    vectors = {name: v for name, v in server.items() if v.shape == server.w.shape and v.is_floating_point()}
    return {name: torch.linalg.vector_norm(v, dtype=accumulator_dtype(v.device)) for name, v in vectors.items()}


@dataclass(frozen=True, repr=False)
class RunState:
    """The state of a run between two rounds, without the clients' rows.

    A round replaces it as a whole and changes nothing in place. So a reference is a snapshot, and a checkpoint holds
    these fields under these names.

    Attributes:
        server: The server's state.
        round: Number of rounds done.
        total_bits: Bits sent and uploaded so far.
        metrics: The latest value of every metric.
        failures: How often each client was refused, dropped or late, by kind and id.
        norms: Norms of the server's vectors after each of the last rounds.
        training: What training without rounds, centralized or asynchronous, needs in addition to continue.
    """

    server: State
    round: int = 0
    total_bits: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failures: Failures = field(default_factory=dict)
    norms: Norms = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns the round, the server's state, and the names of the metrics."""
        return f"RunState(round {self.round}, server: {self.server}, metrics: {', '.join(self.metrics) or 'none'})"

    def after_round(
        self,
        server: State,
        bits: int = 0,
        failed: Mapping[str, Sequence[int]] | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> "RunState":
        """Returns the state after one more round.

        Args:
            server: The server's next state.
            bits: Bits that went over the wire.
            failed: Clients that were refused, dropped or late, by kind.
            training: As for the class.
        """
        return RunState(
            server=server,
            round=self.round + 1,
            total_bits=self.total_bits + bits,
            metrics=self.metrics,
            failures=counted(self.failures, failed or {}),
            norms=(*self.norms[1 - ROUNDS :], norms(server)),
            training=training or {},
        )


def save(path: Path, state: RunState, about: Mapping[str, Any]) -> None:
    """Writes a checkpoint. The file is whole, whenever the process dies.

    Args:
        path: The file.
        state: The run's state.
        about: The other entries of `FORM`, and what ``LightningModule.load_from_checkpoint`` reads.
    """
    files.save(path, move_data_to_device({**about, **vars(state), "server": dict(state.server)}, "cpu"))


def state_of(content: Mapping[str, Any], like: Tensor) -> RunState:
    """Returns the run's state in a checkpoint.

    Args:
        content: The content of the checkpoint.
        like: A tensor of the run's dtype, on its device.
    """
    fields = {name: content[name] for name in RunState.__dataclass_fields__}
    server = content["server"].items()  # masks and integers stay what they are
    values = {name: v.to(like) if v.is_floating_point() else v.to(like.device) for name, v in server}
    return RunState(**{**fields, "server": State(values)})


def load(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Raises:
        UserError: If the file is not a checkpoint of this package.
    """
    try:
        content = files.load(Path(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"ckpt_path = {path}: damaged, or not a checkpoint of fl_lightning ({error}); {REMEDY}"
        ) from None
    wrong = {name for name, right in FORM.items() if not fits(content, {name: right})}
    ensure(
        not wrong, f"ckpt_path = {path}: not a whole checkpoint of fl_lightning ({', '.join(sorted(wrong))}); {REMEDY}"
    )
    return dict(content)


def state_dict(path: Path) -> dict[str, Tensor]:
    """Returns the whole state_dict of a checkpoint's net, frozen parameters included, by name in the net.

    Raises:
        UserError: If the file is not a checkpoint of this package, or the frozen parameters are not next to it.
    """
    return {
        name.removeprefix("net."): value
        for name, value in weights.with_constants(load(path), path, "ckpt_path").items()
    }


def _are_ids(value: Any) -> bool:
    fit = isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 1
    return fit and bool((value >= 0).all()) and len(torch.unique(value)) == len(value)


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", value) is not None


Tensors = dict[str, Tensor]
ROWS: dict[str, Any] = {"row_bytes": NonNegativeInt, "ids": _are_ids, "positions": _are_ids, "stamps": Tensor}
FORM: dict[str, Any] = {
    # the fields of RunState
    "server": Tensors,
    "round": NonNegativeInt,
    "total_bits": NonNegativeInt,
    "metrics": dict[str, Number],
    "failures": dict[str, dict[NonNegativeInt, NonNegativeInt]],
    "norms": tuple[Tensors, ...],
    "training": dict,
    # the clients' rows
    "clients": {
        "ids": _are_ids,
        "rows": Tensors,
        "w0": Tensor,
        "file": lambda file: file is None or fits(file, ROWS),
    },
    # whose they are
    "state_dict": Tensors,
    "buffers": Tensor | None,
    "constant_buffers": Tensors,
    "frozen": str,
    "kind": Kind,
    "identity": dict,
    "config": dict[str, str],
    "settings": dict[str, tuple[Any, Any]],
    "engine": is_name,
    "noise": lambda noise: noise is None or fits(noise, {"key": _is_key, "settings": str}),
    "elapsed": float,
    "records": dict[str, int],
    "callbacks": dict,
    "loggers": dict,
}
"""What a checkpoint holds: by name an annotation, a function that checks a value, or a mapping of these."""
REMEDY = "take an older one from a run's checkpoints folder, or start again"
