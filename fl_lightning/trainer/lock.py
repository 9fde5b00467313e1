"""One run at a time in a run folder."""

import errno
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from fl_lightning.core import UserError, writing

if sys.platform != "win32":
    import fcntl

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


class RunLock:
    """A lock on ``run.lock`` in a run folder; it ends with the process, however that ends.

    It is POSIX's record lock: it works between nodes if the network file system passes locks on (NFS does by default,
    Lustre if mounted with flock). Where a file system has none, a warning says so; Windows has none.

    Args:
        folder: The run folder.

    Raises:
        UserError: If another process holds the lock, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self._fd: int | None = None
        if sys.platform == "win32":
            return
        with writing(self.path):
            while self._fd is None:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                if not _lock(fd, folder):
                    return
                if self._is_at_path(fd):
                    self._fd = fd
                else:  # its holder has just ended and removed it
                    os.close(fd)
            try:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                self.release()
                raise

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock and removes its file."""
        if self._fd is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = None


def check_unused(folder: Path) -> None:
    """Checks that no other process runs in a run folder; writes nothing.

    Raises:
        UserError: If one does.
    """
    if sys.platform == "win32":
        return
    with suppress(FileNotFoundError, PermissionError):
        fd = os.open(folder / "run.lock", os.O_RDWR | os.O_NOFOLLOW)
        if _lock(fd, folder):
            os.close(fd)


def _lock(fd: int, folder: Path) -> bool:
    """Locks an open file of a run folder; closes it with a warning and returns False, where the file system cannot."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if error.errno not in UNSUPPORTED:
            raise UserError(f"{folder}: used by another run (process {holder}); wait for its end, or end it") from None
        warnings.warn(f"{folder}: its file system has no locks; let one run at a time use it", stacklevel=4)
        return False
    return True
