"""Packages whose names are imported on first use."""

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


class UnknownNameError(AttributeError):
    """Names that are alike are searched when they are read: parsers ask packages for hundreds of names."""

    def __str__(self) -> str:
        from fl_lightning.core.errors import similar  # not before it is needed: the package may be core's parent

        package, name, known = self.args
        hint = f"; did you mean {' or '.join(near)}?" if (near := similar(name, known, cutoff=0.8)) else ""
        return f"module '{package}' has no attribute '{name}'{hint}"


def lazy(package: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Returns ``__getattr__`` and ``__all__`` of a package: the names that its ``__init__.pyi`` imports.

    Args:
        package: The package's ``__name__``.
        file: Its ``__file__``.
    """
    lines = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    module_of = {name.name: f"{'.' * line.level}{line.module}" for line in imports for name in line.names}

    def load(name: str) -> object:
        if name in module_of:
            with warnings.catch_warnings():  # of tqdm, which other packages import, in a notebook without ipywidgets
                warnings.filterwarnings("ignore", "IProgress not found")
                found = getattr(import_module(module_of[name], package), name)
            return vars(sys.modules[package]).setdefault(name, found)  # the parser asks for each a thousand times
        raise UnknownNameError(package, name, module_of)

    return load, [*module_of]
