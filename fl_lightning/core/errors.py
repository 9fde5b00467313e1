"""Exceptions with a message for the user; names of packages and mappings, and those meant by wrong ones; overrides."""

import ast
import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakSet


class UserError(ValueError):
    """A mistake in config, data or checkpoint: one line with its remedy.

    Attributes:
        exit_code: Exit code of a command that it ends.
    """

    exit_code = 1


class DivergenceError(UserError):
    """Training has diverged."""

    exit_code = 3


class UnwrittenError(UserError):
    """A file cannot be written: the disk is full or fails, or the folder refuses."""


class NoStateError(UserError, AttributeError):
    """A hook reads a state that is not there."""


def ensure(ok: bool, problem: str) -> None:
    """Raises ``UserError(problem)`` unless ``ok``."""
    if not ok:
        raise UserError(problem)


def folded(text: object, most: int | None = None) -> str:
    """Returns a text, such as that of another package's error, on one line; what exceeds ``most`` letters is cut."""
    line = " ".join(str(text).split())
    return line if most is None or len(line) <= most else f"{line[:most]}…"


def imported(module: str, needs: str) -> Any:
    """Returns a module of a package that is not always installed.

    Args:
        module: Its name.
        needs: Who needs what: "data = HuggingFace: needs datasets; pip install ...".

    Raises:
        UserError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise UserError(needs) from None


def class_at(path: str, packages: Sequence[str], base: type) -> Any:
    """Returns a class below another one, by its dotted path or its name; None if there is no such class.

    Args:
        path: The path, or a name in one of the packages.
        packages: These packages.
        base: The other class.
    """
    package, _, name = path.rpartition(".")
    for module in [package] if package else packages:
        with suppress(ImportError, TypeError):  # no such module, or a relative one
            kind = getattr(import_module(module), name, None)
            if isinstance(kind, type) and issubclass(kind, base):
                return kind
    return None


def require(ok: bool, key: str, value: object, remedy: str) -> None:
    """Checks a setting.

    Args:
        ok: Whether it is right.
        key: Its full name in a config.
        value: Its value.
        remedy: What it may be.

    Raises:
        UserError: If it is not.
    """
    ensure(ok, f"{key} = {value}: {remedy}")


Value = TypeVar("Value")
SYNONYMS = {
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "seed_everything": "seed",
    "max_epochs": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds",
    "rounds": "trainer.max_rounds",
    "epochs": "trainer.max_rounds or trainer.local_epochs",
    "clients": "data.num_clients",
    "gpus": "trainer.devices",
    "logger": "trainer.loggers",
    "wandb": "trainer.loggers",
    "output_dir": "trainer.default_root_dir",
}
"""Settings by their names in other programs; of a name that has two meanings both."""
OF_LIGHTNING = {
    "EarlyStopping": "lightning.pytorch.callbacks.EarlyStopping",
    "ModelCheckpoint": "Checkpoints (monitor, mode, save_top_k)",
    "Timer": "trainer.max_time",
    "ModelSummary": "Progress",
    "LearningRateMonitor": "the metric client/lr, which every run logs",
    "StochasticWeightAveraging": "model.averaging: SWA",
    "WeightAveraging": "model.averaging: EMA",
    "EMAWeightAveraging": "model.averaging: EMA",
    "GradientAccumulationScheduler": "data.batch_size",
    **dict.fromkeys(("ProgressBar", "TQDMProgressBar", "RichProgressBar"), "Progress"),
}
"""What takes the place of a callback of Lightning, by the name of that callback."""


class UnknownNameError(AttributeError):
    """A name that a package lacks; similar ones are searched when the message is read: parsers ask for hundreds."""

    def __str__(self) -> str:
        package, name, known = self.args
        hint = f"; did you mean {' or '.join(matches)}?" if (matches := similar(name, known, cutoff=0.8)) else ""
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
                value = getattr(import_module(module_of[name], package), name)
            return vars(sys.modules[package]).setdefault(name, value)  # the parser asks for each a thousand times
        raise UnknownNameError(package, name, module_of)

    return load, [*module_of]


class UnknownKeyError(KeyError):
    """A name that a mapping lacks, with those that it has: all are searched when the message is read."""

    def __str__(self) -> str:
        name, known = self.args
        matches = [key for key in known if str(name) in key] or similar(str(name), known)
        remedy = f"did you mean {' or '.join(matches[:3])}?" if matches else f"choose from {', '.join(known)}"
        return f"{name!r}: no such name; {remedy}"


class Named(dict[str, Value]):
    """A dict whose error for a name that it lacks says which it has."""

    def __missing__(self, name: str) -> Value:
        raise UnknownKeyError(name, [*self])


def callback_of_lightning(name: str) -> str:
    """Returns the message for a callback of Lightning that a federated run does not call.

    Args:
        name: The name of its class.
    """
    remedy = f"use {OF_LIGHTNING[name]}" if name in OF_LIGHTNING else "write a subclass of fl_lightning.Callback"
    return f"trainer.callbacks = {name}: a callback of lightning.Trainer; {remedy}"


def similar(name: str, known: Iterable[str], cutoff: float = 0.55) -> list[str]:
    """Returns up to three names like another one, the most similar first; the case of letters does not count."""
    cased = {word.casefold(): word for word in known}
    containing = [word for word in cased if len(name) > 4 and name.casefold() in word]  # median: CoordinateMedian
    matches = dict.fromkeys([*containing, *difflib.get_close_matches(name.casefold(), cased, cutoff=cutoff)])
    return [cased[word] for word in matches][:3]


PACKAGE = __name__.partition(".")[0]
CHECKED = WeakSet[type]()
"""Classes in which nothing was found."""


def check_overrides(kind: type) -> None:
    """Checks that what a class overrides takes the arguments with which this package calls it.

    Raises:
        UserError: If a method takes others; it shows the right signature.
    """
    for place, owner in enumerate(kind.__mro__ if kind not in CHECKED else ()):
        for name, method in vars(owner).items() if owner.__module__.partition(".")[0] != PACKAGE else ():
            bases = (c for c in kind.__mro__[place + 1 :] if c.__module__.partition(".")[0] == PACKAGE)
            base = next((c for c in bases if name in vars(c)), None)
            is_new = isinstance(method, FunctionType) and not any(name in vars(c) for c in kind.__mro__[place + 1 :])
            if is_new and not name.startswith("on_"):  # a callback warns of these as soon as it is defined
                _warn_of_spelling(owner, name, method, kind)
            declared = None if base is None or (name[0] == "_" and name != "__call__") else vars(base)[name]
            if isinstance(declared, FunctionType) and isinstance(method, FunctionType):
                wanted, actual = signature(declared), signature(method)
                if not _takes(actual, wanted):
                    base_name = f"{base and base.__name__}.{name}"
                    shown = f"{owner.__name__}.{name}{_text(actual)}"
                    raise UserError(f"{shown}: {base_name} has other arguments; write def {name}{_text(wanted)}")
    CHECKED.add(kind)


def _warn_of_spelling(owner: type, name: str, method: FunctionType, kind: type) -> None:
    """Warns of a new method with almost the name, and with as many arguments, of one of this package."""
    methods = _methods(kind)
    for match in difflib.get_close_matches(name, methods.keys() - vars(owner).keys(), n=1, cutoff=0.85):
        if len(signature(method).parameters) == len(signature(methods[match]).parameters):
            warnings.warn(f"{owner.__name__}.{name}: no hook has this name; did you mean {match}?", stacklevel=3)


def check_hidden(value: object) -> None:
    """Checks that no attribute hides a method of this package.

    Raises:
        UserError: If one does.
    """
    for name in _methods(type(value)):
        shown = f"{type(value).__name__}.{name}"
        ensure(callable(getattr(value, name)), f"{shown}: this attribute hides a method; give it another name")


def _methods(kind: type) -> dict[str, FunctionType]:
    """Returns the public methods that a class has from this package, by name."""
    bases = (c for c in kind.__mro__ if c.__module__.partition(".")[0] == PACKAGE)
    return {n: m for c in bases for n, m in vars(c).items() if isinstance(m, FunctionType) and n[0] != "_"}


def _takes(actual: Signature, wanted: Signature) -> bool:
    """Returns whether a function can be called as another one; one with ``*args`` says too little."""
    parameters = wanted.parameters.values()
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return True
    named = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    for by_name in (
        [p.name for p in named if p.kind is Parameter.KEYWORD_ONLY],
        [p.name for p in named if p.kind is Parameter.KEYWORD_ONLY or p.default is not Parameter.empty],
    ):
        with suppress(TypeError):
            actual.bind(*(p for p in named if p.name not in by_name), **dict.fromkeys(by_name))
            return True
    return False


def _text(signature: Signature) -> str:
    return str(Signature([p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]))
