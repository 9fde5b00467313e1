"""Run folders and checkpoint files: written whole or not at all, read with one clear line for each thing wrong."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.errors import UserError

LAST = Path("checkpoints", "last.ckpt")
"""The newest checkpoint, within a run folder."""


def new_run_dir(root: Path, name: str) -> Path:
    """Make ``root/name/version_k`` with the first free k; safe when several runs start at once."""
    for k in count():
        try:
            (path := root / name / f"version_{k}").mkdir(parents=True)
        except FileExistsError:
            if not (root / name).is_dir():
                raise UserError(
                    f"trainer.default_root_dir = {root}: {root / name} is no folder; choose another"
                ) from None
            continue
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir = {root}: cannot be written ({error.strerror}); choose another folder"
            ) from None
        return path
    raise AssertionError("unreachable")


def resolve(ckpt_path: str, root: Path, name: str) -> Path:
    """The checkpoint file that ``ckpt_path`` means: a path, or "last" for the newest run of this name.

    Raises:
        UserError: If there is none.
    """
    if ckpt_path != "last":
        if not Path(ckpt_path).is_file():
            raise UserError(f"ckpt_path = {ckpt_path}: no such file; give a checkpoint file, or 'last'")
        return Path(ckpt_path)
    found = list((root / name).glob(f"version_*/{LAST}"))
    if not found:
        raise UserError(f"ckpt_path = last: no checkpoint under {root / name}; start without --ckpt_path")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def run_dir_of(path: Path) -> Path:
    """The run folder of a checkpoint.

    Raises:
        UserError: If the file does not lie in a run folder, so that a resumed run would write beside it.
    """
    if path.parent.name != LAST.parent.name:
        raise UserError(
            f"ckpt_path = {path}: not in the checkpoints folder of a run, so there is no run to go on with; to start "
            "from its weights give it as model.init_weights"
        )
    return path.parent.parent


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint atomically: a crash while writing leaves the previous one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name, too, shall outlast the machine
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Raises:
        UserError: If the file is no checkpoint of this package.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"ckpt_path = {path}: not a readable checkpoint ({type(error).__name__}); take an older one, or start anew"
        ) from None
    if not isinstance(checkpoint, dict) or not {"server", "clients", "round", "identity"} <= checkpoint.keys():
        raise UserError(
            f"ckpt_path = {path}: not a checkpoint of fl_lightning; give one from a run's checkpoints folder"
        )
    return checkpoint


def check_identity(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model, data split or seed.

    Args:
        path: The file, for the message.
        saved: What the checkpoint says of its run, by config key.
        here: The same of this run.

    Raises:
        UserError: At the first difference.
    """
    for key, value in here.items():
        if saved.get(key) != value:
            raise UserError(
                f"ckpt_path = {path}: it was made with {key} = {_short(saved.get(key))}, this run has {_short(value)}; "
                "resume with the run's own config.yaml"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
