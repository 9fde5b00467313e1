"""The folder of a run: the paths of its files, the lines that rounds add to them, and the lock."""

import csv
import errno
import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from fl_lightning.core import FROZEN, UserError, ensure, write_atomically, writing
from fl_lightning.results import clients
from fl_lightning.results.configs import changes, config_files, flatten

RECORDS = ("flatness.jsonl", clients.FILE, "events.csv")
"""Files to which rounds of a run add lines, each of which begins with its round; a checkpoint keeps their checksums."""
ROUND = re.compile(rb'(?:\{"round": )?(\d+),')


class RunFolder:
    """Paths of a run's files.

    Args:
        path: The folder.
    """

    CHECKPOINTS = "checkpoints"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """The config of the first start; `newest_config` is that of the last one."""
        self.metrics = path / "metrics.csv"
        self.clients = path / "clients"
        """Clients' state beyond the memory budget."""
        self.failures = path / "clients.csv"
        """Clients that were refused, dropped or late."""
        self.checkpoints = path / self.CHECKPOINTS
        self.last, self.best = self.checkpoints / "last.ckpt", self.checkpoints / "best.ckpt"
        self.frozen = self.checkpoints / FROZEN
        """The net's frozen parameters, which all checkpoints share."""

    @property
    def newest_config(self) -> Path:
        """The config of the run as it is now; that of the first start, if there is none."""
        return [self.config, *config_files(self.path).values()][-1]

    @property
    def name(self) -> str:
        """The experiment's name, which runs of one config share."""
        return self.path.resolve().parent.name

    @property
    def label(self) -> str:
        """Name and version, as figures show them: ``FedGloSS-Digits/version_0``."""
        return f"{self.name}/{self.path.resolve().name}"

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """Creates ``root/name/version_k`` with the first free k; several runs may start at once.

        Raises:
            UserError: If the folder cannot be written.
        """
        for k in count():
            path = root / name / f"version_{k}"
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                ensure(
                    (root / name).is_dir(),
                    f"trainer.default_root_dir = {root}: {root / name} is not a folder; choose another",
                )
            except OSError as error:
                raise UserError(
                    f"trainer.default_root_dir = {root}: cannot be written ({error.strerror}); choose another folder"
                ) from None
        raise AssertionError("unreachable")

    def write_config(self, config: Mapping[str, Any], rounds_done: int, before: Mapping[str, str]) -> str | None:
        """Writes a run's config; that of a resumed run to a file of its own, and only if it differs.

        Args:
            config: The config.
            rounds_done: Rounds done. Configs of later rounds, which are trained once more, are removed.
            before: The checkpoint's settings, flattened: a file may be damaged. Empty: there are none.

        Returns:
            What has changed, as a line to print.

        Raises:
            UserError: If it cannot be written.
        """
        files, settings = config_files(self.path), flatten(config)
        path = self.path / f"config_round_{rounds_done}.yaml" if rounds_done else self.config
        if before != settings:
            write_atomically(path, yaml.safe_dump(dict(config), sort_keys=False))
        for round, later in files.items():
            if round > rounds_done or (round == rounds_done and before == settings):
                later.unlink()
        message = f"settings changed after round {rounds_done}, see {path.name}: {'; '.join(changes(before, config))}"
        return message if before and before != settings else None

    def append_rows(self, name: str, head: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
        """Appends rows to a CSV file, after the head if it is new.

        Raises:
            UserError: If it cannot be written.
        """
        path = self.path / name
        with writing(path), path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*([] if file.tell() else [head]), *rows])

    def drop_later_rounds(self, name: str, rounds: int) -> None:
        """Removes later rounds from a file, and a line that a crash has cut short; the file may be missing."""
        path = self.path / name
        if path.exists():
            write_atomically(path, b"".join(_lines(path, rounds)))

    def checksums(self, rounds: int) -> dict[str, int]:
        """Returns the checksums of the `RECORDS` up to a round: a round that breaks off leaves more lines."""
        return {name: _checksum(self.path / name, rounds) for name in RECORDS if (self.path / name).is_file()}

    def check_records(self, rounds: int, saved: Mapping[str, int]) -> None:
        """Checks the `RECORDS` of a run that is resumed; one that was emptied is right.

        Args:
            rounds: Rounds done.
            saved: The checkpoint's `checksums`.

        Raises:
            UserError: If a line is not as it was written, or a file is missing.
        """
        checksums = self.checksums(rounds)
        for name, checksum in saved.items():
            problem = "a line is not as the run has written it" if name in checksums else "missing"
            ensure(
                checksums.get(name) in (checksum, 0),
                f"{self.path / name}: {problem}; restore the file, or give an empty one to go on without its lines",
            )

    def remove(self, root: Path) -> None:
        """Removes the folder with all in it, and those above it up to ``root`` that are empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        for above in self.path.parents:
            if above == root or not above.is_relative_to(root):
                break
            with suppress(OSError):
                above.rmdir()

    @classmethod
    def of_checkpoint(cls, path: Path) -> "RunFolder":
        """Returns the run folder of a checkpoint.

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
        """Returns the checkpoint file of a ``ckpt_path``: a path, or "last" or "best" of the newest run of this name.

        Raises:
            UserError: If there is none.
        """
        if ckpt_path not in ("last", "best"):
            path = Path(ckpt_path)
            within = [str(file) for file in (path / "last.ckpt", path / "checkpoints/last.ckpt") if file.is_file()]
            kind = " with ".join(["a folder", *within]) if path.is_dir() else "no such file"
            ensure(path.is_file(), f"ckpt_path = {path}: {kind}; give a checkpoint file, 'last' or 'best'")
            return path
        matches = list((root / name).glob(f"version_*/{RunFolder.CHECKPOINTS}/{ckpt_path}.ckpt"))
        remedy = "start without --ckpt_path" if ckpt_path == "last" else "set monitor of the callback Checkpoints"
        ensure(matches != [], f"ckpt_path = {ckpt_path}: no such checkpoint under {root / name}; {remedy}")
        return max(matches, key=lambda path: path.stat().st_mtime_ns)


def _checksum(path: Path, rounds: int) -> int:
    with path.open("r+b") as file:
        os.fsync(file.fileno())  # a checkpoint never knows of more lines than the file
    checksum = 0
    for line in _lines(path, rounds):
        checksum = crc32(line.rstrip(b"\r\n"), checksum)
    return checksum


def _lines(path: Path, rounds: int) -> Iterator[bytes]:
    """Yields the lines up to a round, and those without one, as the head."""
    for line in path.read_bytes().splitlines(keepends=True):
        match = ROUND.match(line)
        if line.endswith(b"\n") and (match is None or int(match[1]) <= rounds):  # else a crash has cut it short
            yield line


LOCK = "run.lock"
"""In a run folder: held by the process of the run."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


class InUse(UserError):
    """Another run uses the folder."""


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Locks a folder by a file in it. The lock ends with the process, however that ends; the file stays.

    It works between nodes if the network file system passes locks on (NFS does by default, Lustre if mounted with
    flock). Where a file system has none, a warning says so.

    Args:
        folder: The folder.
        name: Name of the file.

    Raises:
        InUse: If another run holds the lock.
        UserError: If the folder cannot be written.
    """
    path = folder / name
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with writing(path):
            _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise InUse(f"{folder}: used by another run (process {holder}); wait for its end, or end it") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warnings.warn(f"{folder}: its file system has no locks; let one run at a time use it", stacklevel=2)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def in_use(folder: Path, name: str = LOCK) -> bool:
    """Returns whether a folder is locked; no file changes. Arguments as for `locked`."""
    if not (folder / name).is_file():
        return False
    with (folder / name).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def check_unused(folder: Path) -> None:
    """Checks that no other run uses a run folder.

    Raises:
        UserError: If one does.
    """
    if (folder / LOCK).exists():
        with locked(folder):
            pass
