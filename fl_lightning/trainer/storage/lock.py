"""One run at a time in a run folder."""

import errno
import os
import sys
import warnings
from pathlib import Path

from fl_lightning.core import UserError, writing

if sys.platform != "win32":
    import fcntl

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


class InUse(UserError):
    """Another run uses the folder."""


class RunLock:
    """A lock on ``run.lock`` in a run folder; it ends with the process, however that ends. The file stays.

    It works between nodes if the network file system passes locks on (NFS does by default, Lustre if mounted with
    flock). Where a file system has none, a warning says so; Windows has none.

    Args:
        folder: The run folder.

    Raises:
        InUse: If another run holds the lock.
        UserError: If the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = None
        if sys.platform == "win32":
            return
        path = folder / "run.lock"
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                self._lock(self._fd, folder)
            except BaseException:
                self.release()
                raise

    def _lock(self, fd: int, folder: Path) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InUse(f"{folder}: used by another run (process {holder}); wait for its end, or end it") from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{folder}: its file system has no locks; let one run at a time use it", stacklevel=4)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Releases the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def check_unused(folder: Path) -> None:
    """Checks that no other run uses a run folder.

    Raises:
        UserError: If one does.
    """
    if (folder / "run.lock").exists():
        RunLock(folder).release()
