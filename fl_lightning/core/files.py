"""Files that are written whole or not at all, with a checksum of every byte where asked for."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import torch

from fl_lightning.core.errors import UserError

MARK = b"fl_lightning"
"""What precedes the checksum, a CRC-32 of all bytes before both, at the end of a file."""
TRAILER = len(MARK) + 4
CHUNK = 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk, whichever file they are met in."""


class _Summed:
    """A file that sums up what is written to it, and keeps an error that torch.save would replace."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sum = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes bytes."""
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sum = crc32(data, self.sum)
        return written

    def flush(self) -> None:
        """Flushes the file."""
        self.file.flush()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the error of a write into one line.

    Args:
        path: The file.

    Raises:
        UserError: If the disk is full or read-only, the folder is missing, and so on.
    """
    try:
        yield
    except OSError as error:
        raise _unwritten(path, error) from None


def disk_error(error: OSError, folder: Path) -> UserError | None:
    """One line for an error of a full or failing disk, or of a file below a folder; None for another error."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder
    return _unwritten(path, error) if error.errno in NO_ROOM or folder in path.parents else None


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot be written ({error.strerror}); check the disk and the folder, then continue from the last "
        "checkpoint by --ckpt_path last"
    )


def write_atomically(path: Path, content: str | bytes | Callable[[Any], object], checksum: bool = False) -> None:
    """Writes a file; a crash or an error meanwhile leaves the previous one whole.

    Args:
        path: The file; its folder is created, but not those above: what was removed meanwhile stays so.
        content: Text, bytes, or a function that writes to the open file.
        checksum: Whether to append the checksum that `fault` checks.

    Raises:
        UserError: If it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # exclusive: a link that someone has put there is not followed
                summed = _Summed(file)
                try:
                    if callable(content):
                        content(summed)
                    else:
                        summed.write(content.encode() if isinstance(content, str) else content)
                except RuntimeError as error:  # torch's own, in place of the file's
                    raise summed.error or error from None
                if checksum:
                    file.write(MARK + summed.sum.to_bytes(4, "little"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if os.name == "posix":  # the new name must survive a power failure, too; Windows cannot open a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def save(path: Path, content: Any) -> None:
    """Writes tensors and plain values with a checksum; ``torch.load`` reads the file, too.

    Raises:
        UserError: If it cannot be written.
    """
    write_atomically(path, lambda file: torch.save(content, file), checksum=True)


def load(path: Path) -> Any:
    """Reads what `save` has written onto the CPU; nothing but tensors and plain values.

    Raises:
        ValueError: If the file is damaged; the text says how.
        OSError: If it cannot be read.
    """
    if found := fault(path):
        raise ValueError(found)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"not readable: {type(error).__name__}") from None


def fault(path: Path) -> str | None:
    """Says what is wrong with a file of `write_atomically` with a checksum; None if every bit is as it was written."""
    found, left = 0, path.stat().st_size - TRAILER
    if left < 0:
        return "no checksum at its end"
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, CHUNK))):
            found, left = crc32(chunk, found), left - len(chunk)
        trailer = file.read()
    if trailer[: len(MARK)] != MARK:
        return "no checksum at its end"
    return None if trailer == MARK + found.to_bytes(4, "little") else "its checksum is wrong"


def has_checksum(path: Path) -> bool:
    """Whether a file ends with a checksum, right or wrong."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TRAILER))
        return file.read(len(MARK)) == MARK


def restore_removed(path: Path, descriptor: int) -> None:
    """Writes a file again that was removed while it is open; does nothing otherwise.

    Args:
        path: Its path.
        descriptor: An open descriptor of it, which then is one of the new file.

    Raises:
        UserError: If it cannot be written.
    """
    if os.name != "posix" or os.fstat(descriptor).st_nlink:
        return

    def copy(file: Any) -> None:
        at = 0
        while chunk := os.pread(descriptor, CHUNK, at):
            file.write(chunk)
            at += len(chunk)

    write_atomically(path, copy)
    with path.open("r+b") as file:
        os.dup2(file.fileno(), descriptor, inheritable=False)
