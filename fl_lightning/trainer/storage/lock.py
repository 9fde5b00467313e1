"""One run at a time in a run folder."""

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.core import UserError, writing

if sys.platform != "win32":
    import fcntl

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
    flock). Where a file system has none, a warning says so; Windows has none.

    Args:
        folder: The folder.
        name: Name of the file.

    Raises:
        InUse: If another run holds the lock.
        UserError: If the folder cannot be written.
    """
    if sys.platform == "win32":
        yield
        return
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


def in_use(folder: Path) -> bool:
    """Returns whether a run uses a run folder; no file changes."""
    if sys.platform == "win32" or not (folder / LOCK).is_file():
        return False
    with (folder / LOCK).open() as file:
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
