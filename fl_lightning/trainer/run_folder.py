"""The folder of a run: what lies where."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from fl_lightning.core import UserError, ensure


class RunFolder:
    """Paths of a run's files.

    Args:
        path: The folder.
    """

    CHECKPOINTS = "checkpoints"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.clients = path / "clients"
        """Clients' state beyond the memory budget."""
        self.incidents = path / "clients.csv"
        """Clients that were refused, late or missing."""
        self.checkpoints = path / self.CHECKPOINTS
        self.last = self.checkpoints / "last.ckpt"
        self.best = self.checkpoints / "best.ckpt"

    @property
    def name(self) -> str:
        """The experiment's name, which runs of one config share."""
        return self.path.resolve().parent.name

    @property
    def label(self) -> str:
        """Name and version, as figures show them: ``FedGloSS-Digits/version_0``."""
        return f"{self.name}/{self.path.resolve().name}"

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """Creates ``root/name/version_k`` with the first free k; several runs may start at once.

        Raises:
            UserError: If the folder cannot be written.
        """
        for k in count():
            try:
                (path := root / name / f"version_{k}").mkdir(parents=True)
            except FileExistsError:
                if not (root / name).is_dir():
                    raise UserError(
                        f"trainer.default_root_dir = {root}: {root / name} is not a folder; choose another"
                    ) from None
                continue
            except OSError as error:
                raise UserError(
                    f"trainer.default_root_dir = {root}: cannot be written ({error.strerror}); choose another folder"
                ) from None
            return cls(path)
        raise AssertionError("unreachable")

    @classmethod
    def of_checkpoint(cls, path: Path) -> RunFolder:
        """The run folder of a checkpoint.

        Raises:
            UserError: If the file does not lie in the checkpoints folder of a run.
        """
        ensure(
            path.parent.name == cls.CHECKPOINTS,
            f"ckpt_path = {path}: not in the checkpoints folder of a run, so there is no run to continue; to start "
            "from its weights, give it as model.init_weights",
        )
        return cls(path.parent.parent)

    @staticmethod
    def find_checkpoint(ckpt_path: str, root: Path, name: str) -> Path:
        """The checkpoint file of a ``ckpt_path``: a path, or "last" or "best" of the newest run of this name.

        Raises:
            UserError: If there is none.
        """
        if ckpt_path not in ("last", "best"):
            ensure(
                Path(ckpt_path).is_file(),
                f"ckpt_path = {ckpt_path}: no such file; give a checkpoint file, 'last' or 'best'",
            )
            return Path(ckpt_path)
        found = list((root / name).glob(f"version_*/{RunFolder.CHECKPOINTS}/{ckpt_path}.ckpt"))
        if not found:
            remedy = "start without --ckpt_path" if ckpt_path == "last" else "set monitor of the callback Checkpoints"
            raise UserError(f"ckpt_path = {ckpt_path}: no such checkpoint under {root / name}; {remedy}")
        return max(found, key=lambda path: path.stat().st_mtime_ns)
