"""Files that are written completely or not at all, with a checksum of every byte on request."""

import errno
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from fl_lightning.core.errors import UnwrittenError, UserError, ensure
from fl_lightning.core.forms import fits

MARK = b"fl_lightning"
"""What precedes the checksum, a CRC-32 of all bytes before both, at the end of a file."""
UNMARKED, WRONG = "no checksum at its end", "its checksum is wrong"
FROZEN = "frozen.pt"
"""File with the constants of a run's net, next to its checkpoints, once for all of them."""
PLAIN = (NoneType, bool, int, float, complex, str, bytes, bytearray)
CHUNK = 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Numbers of the errors of a full or failing disk, which may name any file."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of writing into a message of one line.

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
    """Returns one line for an error of a full or failing disk, or of a file below a folder; None for other errors."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder
    return _unwritten(path, error) if error.errno in NO_ROOM or folder in path.parents else None


def _unwritten(path: Path, error: OSError) -> UnwrittenError:
    return UnwrittenError(f"{path}: cannot be written ({error.strerror}); check the disk and the folder")


def write_atomically(path: Path, content: str | bytes | Callable[[Any], object], checksum: bool = False) -> None:
    """Writes a file; after a crash or an error the previous one is intact.

    Args:
        path: The file; its folder is created, but not those above it: a run folder that was removed stays removed.
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
            with temporary.open("x+b") as file:  # exclusive: a link that someone has put there is not followed
                try:
                    if callable(content):
                        content(file)
                    else:
                        file.write(content.encode() if isinstance(content, str) else content)
                except RuntimeError as error:  # torch's own, while it handles the file's
                    raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
                if checksum:
                    file.write(_trailer(file, file.tell()))
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


def make_folder(path: str | Path, key: str = "out") -> Path:
    """Creates a folder, if it is not there, and returns it.

    Args:
        path: The folder.
        key: The setting that names another one.

    Raises:
        UserError: If it cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RecursionError) as error:  # Path.mkdir calls itself for each folder above
        raise _no_folder(path, key, getattr(error, "strerror", "too many levels")) from None
    return folder


def check_folder(path: str | Path) -> None:
    """Refuses a folder that cannot be created, or written in, before what takes long; it creates nothing.

    Args:
        path: The folder, the setting ``out``.

    Raises:
        UserError: If a file stands in its way, or its permissions do not allow it.
    """
    existing = next(above for above in (Path(path), *Path(path).parents) if os.path.lexists(above))
    if not existing.is_dir():
        raise _no_folder(path, "out", os.strerror(errno.EEXIST if existing == Path(path) else errno.ENOTDIR))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _no_folder(path, "out", os.strerror(errno.EACCES))


def _no_folder(path: str | Path, key: str, reason: str) -> UserError:
    return UserError(f"{key} = {path}: cannot create this folder ({reason}); choose another one")


def write_together(files: Mapping[Path, str | bytes]) -> None:
    """Writes files; none of them if a folder has the name of one.

    Args:
        files: Their contents by path.

    Raises:
        UserError: If one cannot be written.
    """
    for path in files:
        ensure(not path.is_dir(), f"{path}: cannot be written over a folder; choose another one")
    for path, content in files.items():
        write_atomically(path, content)


def save(path: Path, content: Any) -> None:
    """Writes tensors and plain values with a checksum; ``torch.load`` reads the file, too.

    Raises:
        UserError: If it cannot be written.
    """
    import torch  # takes seconds; most commands read text only

    write_atomically(path, lambda file: torch.save(content, file), checksum=True)


def check_plain(where: str, value: Any) -> None:
    """Checks that `load` reads what `save` writes of a value: tensors, numbers, text, and lists and dicts of them.

    Args:
        where: The name of the value, for the message.
        value: The value.

    Raises:
        UserError: If it is, or holds, something else.
    """
    import torch

    if type(value) in (dict, OrderedDict, Counter):
        for key, entry in value.items():
            check_plain(where, key)
            check_plain(f"{where}.{key}", entry)
    elif type(value) in (list, tuple, set):
        for entry in value:
            check_plain(where, entry)
    else:
        plain = type(value) in PLAIN or isinstance(value, (torch.Tensor, torch.Size, torch.dtype, torch.device))
        remedy = "a checkpoint takes tensors, numbers, text, and lists and dicts of them (float(x) of a NumPy number)"
        ensure(plain, f"{where}: a {type(value).__module__}.{type(value).__qualname__}; {remedy}")


def load(path: Path) -> Any:
    """Reads what `save` has written onto the CPU; nothing but tensors and plain values.

    Raises:
        ValueError: If the file is damaged; the text says how.
        OSError: If it cannot be read.
    """
    import torch

    if problem := fault(path):
        raise ValueError(problem)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"not readable: {type(error).__name__}") from None


def read_json(path: Path, form: Any, empty: Any = None) -> Any:
    """Returns the content of a JSON file of a run; ``empty`` if there is no such file.

    Args:
        path: The file.
        form: The annotation that its content must fit, see `fl_lightning.core.forms.fits`.
        empty: An empty content.

    Raises:
        UserError: If it is not readable, or has another form.
    """
    return parse_json(path.read_bytes(), path, form) if path.is_file() else empty


def parse_json(text: bytes, path: Path, form: Any) -> Any:
    """Returns the content of a JSON text from a file, NaN and infinity as None; errors as for `read_json`."""
    try:
        content = json_values(json.loads(text.decode()))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable ({error}); restore or remove it") from None
    ensure(fits(content, form), f"{path}: not what a run writes there; restore or remove it")
    return content


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a mapping of JSON, as ``object_pairs_hook``: of a key that is there twice, one value would be lost.

    Raises:
        ValueError: If a key is there twice.
    """
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice:.40} is there twice; give it once")
    return mapping


def json_values(value: Any) -> Any:
    """Returns mappings, dataclasses, arrays and numbers as values of JSON, which has neither NaN nor infinity."""
    value = vars(value) if is_dataclass(value) else value
    if isinstance(value, Mapping):
        return {key: json_values(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.number | np.bool_ | float):
        return np.where(np.isfinite(value), value, None).tolist()  # type: ignore[call-overload]  # an array of objects
    return [json_values(entry) for entry in value] if isinstance(value, list | tuple) else value


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns the text of a JSON file: `json_values`, and a line's end."""
    return json.dumps(json_values(value), indent=indent, allow_nan=False) + "\n"


def fault(path: Path) -> str | None:
    """Returns what is wrong with a file that has a checksum, `UNMARKED` or `WRONG`; None if every bit is as written."""
    with path.open("rb") as file:
        expected = _trailer(file, max(0, path.stat().st_size - len(MARK) - 4))
        trailer = file.read()
    return UNMARKED if not trailer.startswith(MARK) else None if trailer == expected else WRONG


def _trailer(file: BinaryIO, size: int) -> bytes:
    """Reads the first bytes of a file, and returns what follows them in a file with a checksum."""
    file.seek(0)
    checksum = 0
    while size and (chunk := file.read(min(size, CHUNK))):
        checksum, size = crc32(chunk, checksum), size - len(chunk)
    return MARK + checksum.to_bytes(4, "little")


def restore_removed(path: Path, descriptor: int) -> None:
    """Writes a file again if it was removed while it is open.

    Args:
        path: Its path.
        descriptor: An open descriptor of it; afterwards it is a descriptor of the new file.

    Raises:
        UserError: If it cannot be written.
    """
    if os.name != "posix" or os.fstat(descriptor).st_nlink:
        return

    def copy(file: Any) -> None:
        offset = 0
        while chunk := os.pread(descriptor, CHUNK, offset):
            file.write(chunk)
            offset += len(chunk)

    write_atomically(path, copy)
    with path.open("r+b") as file:
        os.dup2(file.fileno(), descriptor, inheritable=False)
