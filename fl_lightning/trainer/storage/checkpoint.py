"""The file of a checkpoint: all that a run needs to continue as if it had never stopped."""

import re
from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from fl_lightning.core import NonNegativeInt, State, UserError, ensure, files, fits, weights
from fl_lightning.engine import is_name
from fl_lightning.trainer.aggregation.accountant import BYTES
from fl_lightning.trainer.settings import Kind
from fl_lightning.trainer.state import RunState


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
    return RunState(**{**fields, "server": State({name: value.to(like) for name, value in content["server"].items()})})


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Raises:
        UserError: If the file is not a checkpoint of this package.
    """
    try:
        content = files.load(path)
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
