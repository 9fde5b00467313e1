"""The rows of a stored study: two files hold them all, and each row becomes a folder again that reads as a run's.

``rows.jsonl`` has a line a row: its name, method, column and seed; ``about``, whose run it is and what checks found;
its config, in the first line whole, in the others as the settings that differ from it. ``metrics.csv.xz`` is one table
of all metrics, a line a round. Its head and each row are streams of xz of their own, so that a row is read or added
alone; other programs read them as one table.
"""

import atexit
import csv
import io
import json
import lzma
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache, cached_property, reduce
from itertools import accumulate
from operator import getitem
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import yaml

from fl_lightning.core import UserError, ensure, json_text, make_folder, parse_json, write_atomically
from fl_lightning.results.configs import load_yaml
from fl_lightning.results.metrics import FILE, table_text

CONFIG, ROW, ABOUT = "config.yaml", "row.json", "about.yaml"
"""Of a row: its config, and whose run it is. Of a store: title, text, and the reference's name."""
ROWS, METRICS = "rows.jsonl", "metrics.csv.xz"
MAGIC = b"\xfd7zXZ\x00"
"""First bytes of a stream of xz."""
KEYS = ["row", "method", "column", "seed"]
"""First columns of the table of all metrics."""
REPEATED = re.compile(r"(/(seed_-?|version_)\d+)+$")
"""End of the name of a row, which is that of one run of a method."""
Line = dict[str, Any]
"""A line of ``rows.jsonl``."""


def _is_inside(name: Any) -> bool:
    """Returns whether a path leads to below the folder that it starts from; a store may be a stranger's."""
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


LINE: Line = {
    "row": _is_inside,
    **dict.fromkeys(("method", "column"), str),
    **dict.fromkeys(("seed", "bytes"), int),
    **dict.fromkeys(("about", "config"), dict[str, Any]),
    "columns?": list[str],
    "files?": lambda files: isinstance(files, dict) and all(map(_is_inside, files)),
    "thinned?": bool,
}
"""Its form, see `fits`."""


class Store:
    """The rows of a study.

    Args:
        folder: Its folder; one without rows is an empty store.

    Attributes:
        folder: Its folder.
        lines: The lines of ``rows.jsonl``.

    Raises:
        UserError: If ``rows.jsonl`` is damaged, or has two rows of one name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ROWS
        texts = path.read_bytes().splitlines() if path.is_file() else []
        self.lines: list[Line] = [parse_json(text, path, LINE) for text in texts]
        duplicates = [row for row, n in Counter(line["row"] for line in self.lines).items() if n > 1]
        remedy = "restore it, and join stores by fl-lightning study add"
        ensure(not duplicates, f"{path}: several rows {', '.join(duplicates)}; {remedy}")

    @classmethod
    @contextmanager
    def edited(cls, folder: Path) -> Iterator["Store"]:
        """Reads a store, and writes it at the end, if nothing has failed; see also `alone`.

        Raises:
            UserError: If it cannot be made, or is damaged.
        """
        try:
            with alone(make_folder(folder, "into")):
                store = cls(folder)
                yield store
                store.write()
        finally:
            with suppress(OSError):
                folder.rmdir()  # if it is empty, since something has failed

    def matching(self, name: str) -> list[Line]:
        """Returns the lines of a row, of the rows below a name, or of a shell's pattern of both; of all for ``.``.

        A name that rows have is no pattern, though it has a bracket.
        """
        below = [line for line in self.lines if f"{line['row']}/".startswith("" if name == "." else f"{name}/")]
        return below or [line for line in self.lines if fnmatchcase(f"{line['row']}/", f"{name}/*")]

    def files(self, line: Line) -> dict[str, str]:
        """Returns the texts of a row's files, by name.

        Raises:
            UserError: If its metrics are damaged.
        """
        heading, *streams = self._streams
        with self._reading():
            head, *rows = [*_cells(heading), *_cells(streams[self.lines.index(line)])]
        filled = [name for name, *cells in zip(head, *rows, strict=True) if name not in KEYS and any(cells)]
        columns = [head.index(name) for name in line.get("columns", filled)]
        lines = [[row[index] for index in columns] for row in (head, *rows)]
        config, about = config_text(self.config(line)), json_text(line["about"], indent=1)
        return {CONFIG: config, FILE: table_text(lines[0], lines[1:]), ROW: about, **line.get("files", {})}

    def config(self, line: Line) -> Any:
        """Returns the config of a row."""
        root = deepcopy(self.lines[0]["config"])
        for path, value in line["config"].items():
            *parents, last = path.split(".")
            reduce(getitem, parents, root)[last] = value
        return root[""]

    def put(self, name: str, files: Mapping[str, str]) -> None:
        """Adds a row, or puts it in the place of the one with its name; `write` writes it.

        Args:
            name: Its name: column, method, and ``seed_<n>``, with slashes between.
            files: The texts of its files, by name: config, metrics and ``row.json``, and others, if it has more.
        """
        names = [line["row"] for line in self.lines]
        index = names.index(name) if name in names else len(names)
        config, about = load_yaml(files[CONFIG]), json.loads(files[ROW])
        *column, method = REPEATED.sub("", name).split("/")
        head, *rows = csv.reader(io.StringIO(files[FILE], newline=""))
        heading, *streams = self._streams or [b""]
        old_columns = _cells(heading)[0] if heading else KEYS
        columns = [*dict.fromkeys([*old_columns, *head])]
        if commas := "," * (len(columns) - len(old_columns)):
            streams = [_packed(_text(stream).replace("\r\n", f"{commas}\r\n")) for stream in streams]
        line = {"row": name, "method": method, "column": "/".join(column), "seed": about["seed"]}
        records = [dict(zip([*KEYS, *head], [*line.values(), *row], strict=True)) for row in rows]
        first, *others = [[row.get(name, "") for name in columns] for row in records]
        streams[index : index + 1] = [_packed(table_text(first, others))]
        filled = [name for name in columns if name not in KEYS and any(row.get(name) for row in records)]
        line |= {"about": about} | ({} if filled == head else {"columns": head})
        line |= {"thinned": True} if len(rows) < about.get("rounds", 0) else {}
        configs = [*map(self.config, self.lines[1:])] if index == 0 else []
        line["config"] = changes(self.config(self.lines[0]) if index else None, config)
        self.lines[index : index + 1] = [json.loads(json_text(line))]
        for other_line, other_config in zip(self.lines[1:], configs, strict=False):
            other_line["config"] = changes(config, other_config)
        for stored, stream in zip(self.lines, streams, strict=True):
            stored["bytes"] = len(stream)
        self._streams = [_packed(table_text(columns, [])), *streams]
        texts = self.files(self.lines[index])
        if other_texts := {name: text for name, text in files.items() if texts.get(name) != text}:
            self.lines[index]["files"] = other_texts

    def remove(self, name: str) -> None:
        """Removes a row; `write` writes the others."""
        at = [line["row"] for line in self.lines].index(name)
        configs = [self.config(line) for line in self.lines]
        del self._streams[at + 1], self.lines[at], configs[at]  # the streams are read by all lines, so they come first
        for k, (line, config) in enumerate(zip(self.lines, configs, strict=True)):
            line["config"] = changes(configs[0] if k else None, config)

    def write(self) -> None:
        """Writes both files.

        Raises:
            UserError: If one cannot be written.
        """
        text = "".join(map(json_text, self.lines))
        write_atomically(make_folder(self.folder, "into") / METRICS, b"".join(self._streams))
        write_atomically(self.folder / ROWS, text)

    @cached_property
    def _streams(self) -> list[bytes]:
        """The head of the table, and the lines of each row, compressed; nothing of an empty store."""
        if not self.lines:
            return []
        with self._reading():
            data = (self.folder / METRICS).read_bytes()
            head = next(_streams_in(data))
            ends = [*accumulate((line["bytes"] for line in self.lines), initial=len(head))]
            if all(data[end : end + len(MAGIC)] in (MAGIC, b"") for end in ends):
                return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            _, *streams = _streams_in(data)  # a process was killed after it had written this file, and not the other
            of_row = {_cells(stream)[0][0]: stream for stream in streams}
            return [head, *(of_row[line["row"]] for line in self.lines)]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError, LookupError, StopIteration, lzma.LZMAError) as error:
            raise UserError(f"{self.folder / METRICS}: not readable ({error}); restore it") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets other processes that would edit a folder wait, if its file system has locks for folders."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl  # which Windows lacks

            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def extract(files: Mapping[str, str], folder: Path) -> None:
    """Writes the texts of a row's files into a folder.

    Raises:
        UserError: If the folder cannot be made.
    """
    for name, text in files.items():
        (make_folder((folder / name).parent) / Path(name).name).write_text(text, encoding="utf-8", newline="")


def config_text(config: Any) -> str:
    """Returns a config as the text of ``config.yaml``."""
    return str(yaml.dump(config, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))


def changes(base: Any, config: Any, at: str = "") -> dict[str, Any]:
    """Returns the values of a config that differ from a base, by keys with dots between; see `Store.config`."""
    same_keys = isinstance(base, dict) and isinstance(config, dict) and [*base] == [*config]
    if same_keys and all(isinstance(key, str) and "." not in key for key in config):
        return {path: value for key in config for path, value in changes(base[key], config[key], f"{at}.{key}").items()}
    return {} if json.dumps(base, default=str) == json.dumps(config, default=str) else {at: config}


def store_of(path: str | Path) -> tuple[Path, str] | None:
    """Returns the folder of a store, and the name of rows in it, if a path names that: ``ledger/digits/alpha_0``."""
    resolved = Path(path).resolve()
    candidates = [resolved] if resolved.is_dir() else resolved.parents
    return next(
        ((folder, resolved.relative_to(folder).as_posix()) for folder in candidates if (folder / ROWS).is_file()), None
    )


def located(path: str | Path) -> list[Path]:
    """Returns the folders that a path names: its own, or those into which the rows of a store are unpacked.

    They are left until the process ends.

    Raises:
        UserError: If the store is damaged.
    """
    resolved, location = Path(path).resolve(), store_of(path)
    if location is None:
        return [resolved]
    folder, name = location
    root, store = _place(folder, (folder / ROWS).stat().st_mtime_ns), Store(folder)
    for line in store.matching(name):
        if not (root / line["row"]).is_dir():
            extract(store.files(line), root / line["row"])
    return ([root / name] if (root / name).is_dir() else sorted(root.glob(name))) or [resolved]


@cache
def _place(store: Path, written: int) -> Path:
    """Returns a temporary folder of the store's name, with its ``about.yaml``; another one when it was written anew."""
    folder = Path(mkdtemp(prefix="fl_lightning_"))
    atexit.register(rmtree, folder, ignore_errors=True)
    extract({path.name: path.read_text(encoding="utf-8") for path in store.glob(ABOUT)}, folder / store.name)
    return folder / store.name


def _streams_in(data: bytes) -> Iterator[bytes]:
    while data:
        stream = lzma.LZMADecompressor()
        stream.decompress(data)
        yield data[: len(data) - len(stream.unused_data)]
        data = stream.unused_data


def _packed(text: str) -> bytes:
    return lzma.compress(text.encode(), preset=6)


def _text(stream: bytes) -> str:
    return lzma.decompress(stream).decode()


def _cells(stream: bytes) -> list[list[str]]:
    return [*csv.reader(io.StringIO(_text(stream), newline=""))]
