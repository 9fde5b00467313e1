"""One run at a time in a run folder."""

import errno
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO

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
        self._file: IO[str] | None = None
        if sys.platform == "win32":
            return
        while self._file is None:
            with writing(self.path):
                file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = file.read(32).strip()
                file.close()
                if error.errno not in UNSUPPORTED:
                    raise UserError(
                        f"{folder}: used by another run (process {holder or 'unknown'}); wait for its end, or end it"
                    ) from None
                warnings.warn(f"{folder}: its file system has no locks; let one run at a time use it", stacklevel=2)
                return
            if self._is_at_path(file):  # else its holder has just ended and removed it
                self._file = file
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _is_at_path(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock and removes its file."""
        if self._file is not None:
            with suppress(OSError):
                self.path.unlink()
            self._file.close()
            self._file = None
