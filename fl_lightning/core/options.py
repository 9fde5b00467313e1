"""Options that are checked against their annotations, the same from Python, YAML and the command line."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from fl_lightning.core.errors import (
    SYNONYMS,
    UserError,
    check_hidden,
    check_overrides,
    ensure,
    folded,
    require,
    similar,
)
from fl_lightning.core.forms import PLAIN, UNIONS, fits, in_words, is_limited
from fl_lightning.core.secrets import hidden

CheckedMethod = TypeVar("CheckedMethod", bound=Callable[..., Any])
SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
RAN = "_constructors"
"""Attribute of an object under construction: the constructors that have been called."""


class Checked:
    """Base of the classes that a config names: each constructor checks its arguments against their annotations.

    A float is finite, an int is no bool and no float, a `Literal` is one of its values, an `Interval` holds the number,
    and anything else is an instance of its class. Ints pass for floats, numbers of NumPy for both, paths for text. In
    constructors outside this package, only options with a `Literal` or an `Interval` are checked: a plain float may be
    infinite there, and a class may be one of an earlier cell of a notebook.

    Attributes:
        config_key: Where the class stands in a config, for messages; ``{}`` stands for its name.
    """

    config_key: ClassVar[str] = "{}"

    def __init_subclass__(cls, key: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if key is not None:
            cls.config_key = key
        if "__init__" in vars(cls):
            _annotate(cls)
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Returns the class with its settings, but for defaults and what is too large to show; a net's is torch's."""
        text = super().__repr__()
        if " object at 0x" not in text:
            return text
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Checked) and "__init__" in vars(kind)]
        parameters = {
            n: p.default for kind in reversed(kinds) for n, p in _signature(kind.__init__)[0].parameters.items()
        }
        plain = (str, Real, os.PathLike)
        shown = {
            name: value
            for name, default in parameters.items()
            if isinstance(value := vars(self).get(name), (*plain, list, tuple, Mapping, Checked))
            and not (isinstance(value, plain) and str(value) == str(default))
        }
        settings = (f"{name}={_brief(value)}" for name, value in hidden(shown).items())
        return f"{type(self).__name__}({', '.join(settings)})"

    def constructed(self, arguments: inspect.BoundArguments) -> None:
        """Called once, at the end of the outermost constructor.

        Args:
            arguments: Its arguments, defaults included.
        """


def check_arguments(function: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> None:
    """Checks arguments against the signature and the annotations of the function that they are for.

    Args:
        function: The function, a constructor or another method.
        key: Key of its settings in a config; empty if its arguments have none.
        *args: Its arguments by position, the object first.
        **kwargs: Its arguments by name.

    Raises:
        UserError: If one does not fit, is missing, or is not an argument of the function.
    """
    signature, hints = _signature(function)
    parameters = signature.parameters
    try:
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        kinds = {parameter.kind for parameter in parameters.values()}
        for name in () if inspect.Parameter.VAR_KEYWORD in kinds else {*kwargs} - {*parameters}:
            refuse_setting(key, name, kwargs[name], type(args[0]) if function.__name__ == "__init__" else function)
        names = ", ".join([*parameters][1:])
        raise UserError(f"{function.__qualname__}({names}): {error}; give each argument once, by its name") from None
    check_values(key, arguments, hints)
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is parameter.empty and parameter.kind not in SEVERAL:
            words = in_words(hints[name]).rstrip(",") + _such_as(name, hints[name]) if name in hints else "a value"
            raise UserError(f"{key}.{name}".lstrip(".") + f": missing; give {words}")


def check_values(key: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Checks values against annotations.

    Args:
        key: The key above them in a config; empty if there is none.
        values: The values by name.
        hints: The annotations by name; a value without one is not checked.

    Raises:
        UserError: If one does not fit.
    """
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            words = in_words(hints[name])
            shown = repr(value) if isinstance(value, str) and "number" in words else _shown(value)
            require(False, f"{key}.{name}".lstrip("."), shown, f"give {_remedy(name, value, hints).rstrip(',')}")


def _remedy(name: str, value: Any, hints: Mapping[str, Any]) -> str:
    """Returns what to give in the place of a value that does not fit its annotation."""
    hint, entry = hints[name], value[0] if isinstance(value, list | tuple) and value else value
    kind = entry if isinstance(entry, type) else type(entry)
    if kind.__module__.startswith("torch.optim"):
        return f'TorchOptimizer("{kind.__name__}", lr=0.1), which makes one for each client'
    if isinstance(value, float) and value.is_integer() and fits(int(value), hint):
        return f"{in_words(hint)}, written {int(value)}"
    fitting = [option for option, h in hints.items() if isinstance(h, type) and h not in PLAIN and isinstance(value, h)]
    swapped = f"; it is no {name} but a {fitting[0]}" if fitting else ""
    return in_words(hint) + _such_as(name, hint, entry if isinstance(entry, str) else kind.__name__) + swapped


def _such_as(name: str, hint: Any, asked: str = "") -> str:
    """Returns an example of an argument: of its classes the one most like a given name, else a usual one."""
    closest = similar(asked, _classes_of(hint, object))
    if not closest and name in EXAMPLES:
        return f", such as {EXAMPLES[name]}"
    classes = closest or (_classes_of(hint, Checked) if asked else [])
    return f", such as {classes[0]}(...)" if classes else ""


def checked(method: CheckedMethod) -> CheckedMethod:
    """Makes a method check its arguments, as the constructors of a `Checked` class do."""

    @wraps(method)
    def checked_method(*args: Any, **kwargs: Any) -> Any:
        check_arguments(method, "", *args, **kwargs)
        return method(*args, **kwargs)

    return cast(CheckedMethod, checked_method)


EXAMPLES = {"model": "FedAvg(net)", "datamodule": "Digits()", "net": "DigitsMLP()", "loggers": "WandbLogger()"}
"""Objects for arguments that many classes fit."""


def refuse_setting(key: str, name: str, value: Any, callee: Callable[..., Any]) -> None:
    """Refuses a setting that the constructors of a class, or a method, do not take.

    Args:
        key: Where the class stands in a config, such as ``trainer``; empty for a method.
        name: Name of the setting.
        value: Its value.
        callee: The class, or the method.

    Raises:
        UserError: Always; it names similar settings, or all.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    functions = (
        [vars(c)["__init__"] for c in callee.__mro__ if "__init__" in vars(c)] if isinstance(callee, type) else [callee]
    )
    accepted: list[inspect.Parameter] = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        accepted += [p for p in parameters if p.kind in kinds]
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break  # it hands no further settings on to the base class
    known = sorted({p.name for p in accepted} - {"self"})
    matches = [SYNONYMS[name]] if key and name in SYNONYMS else [f"{key}.{n}".lstrip(".") for n in similar(name, known)]
    hint = f"did you mean {' or '.join(matches)}?" if matches else f"choose from {', '.join(known)}"
    require(False, f"{key}.{name}".lstrip("."), _shown(value), f"no such {'setting' if key else 'argument'}; {hint}")


def _annotate(cls: type) -> None:
    """Gives a constructor's parameter without annotation that of a base class, where it is a class: so net is a net.

    The command line makes objects by annotations. Numbers and text of a class may have another range than its base's.
    """
    init = vars(cls)["__init__"]
    for name, parameter in inspect.signature(init).parameters.items():
        if parameter.annotation is parameter.empty and parameter.kind not in SEVERAL:
            bases = (base for base in cls.__mro__[1:] if issubclass(base, Checked) and "__init__" in vars(base))
            hint = next(filter(None, (_signature(vars(base)["__init__"])[1].get(name) for base in bases)), None)
            kinds = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
            if all(isinstance(kind, type) and (kind is NoneType or kind not in PLAIN) for kind in kinds):
                init.__annotations__[name] = hint


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def checked_init(self: Checked, *args: Any, **kwargs: Any) -> None:
        from fl_lightning.core.made import Made  # it imports torch, which takes seconds; a table needs none

        key = self.config_key.format(type(self).__name__)
        args, kwargs = tuple(map(_number, args)), {name: _number(value) for name, value in kwargs.items()}
        check_arguments(init, key, self, *args, **kwargs)
        bound = _signature(init)[0].bind(self, *args, **kwargs)
        vars(self).setdefault(RAN, {})[checked_init] = _exact(bound, _signature(init)[1])
        incomplete = (
            f"{type(self).__name__}: its constructor must call super().__init__() first, with the other arguments"
        )
        try:
            init(self, *args, **kwargs)
        except AttributeError as error:
            ensure("before Module.__init__" not in str(error), incomplete)
            raise
        if type(self).__init__ is checked_init:
            check_overrides(type(self))
            constructors = [c.__init__ for c in type(self).__mro__ if issubclass(c, Checked) and "__init__" in vars(c)]
            calls = vars(self).pop(RAN)
            ensure(constructors[-1] in calls, incomplete)
            check_hidden(self)
            Made.note(self, [*calls.values()])
            bound.apply_defaults()
            self.constructed(bound)

    return checked_init


def _number(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, which a checkpoint takes; other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _exact(bound: inspect.BoundArguments, hints: Mapping[str, Any]) -> inspect.BoundArguments:
    """Returns a copy of bound arguments in which whole numbers that are floats by their annotations are floats."""

    def exact(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [*map(exact, value)]
        return float(value) if PLAIN[int][1](value) else value

    words = {name: in_words(hints.get(name)) for name in bound.arguments}
    floats = {name for name, text in words.items() if PLAIN[float][0] in text and PLAIN[int][0] not in text}
    arguments = {name: exact(value) if name in floats else value for name, value in bound.arguments.items()}
    return inspect.BoundArguments(bound.signature, arguments)


@cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Returns the signature, and the annotations of its named parameters; none of them if a name in them is unknown."""
    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        hints = {}
    ours = function.__module__.partition(".")[0] == __name__.partition(".")[0]
    names = [
        name for name, parameter in signature.parameters.items() if name in hints and parameter.kind not in SEVERAL
    ]
    return signature, {name: hints[name] for name in names if ours or is_limited(hints[name])}


def _classes_of(hint: Any, base: type) -> list[str]:
    """Returns the names of the imported classes, of this package and torch's losses, below an annotation's classes.

    Args:
        hint: The annotation.
        base: Only those of its classes count that are below this one.
    """
    types = [hint]
    for kind in types:
        below = kind.__subclasses__() if isinstance(kind, type) and kind not in PLAIN and issubclass(kind, base) else ()
        types += get_args(kind) or below
    named = {*get_args(hint), hint}
    roots = ((kind, c) for kind in named if isinstance(kind, type) for c in kind.__mro__ if "config_key" in vars(c))
    if any(inspect.isabstract(root) and not inspect.isabstract(kind) for kind, root in roots):
        return []  # the annotation names a class that can be made
    classes = sorted(
        (kind for kind in types if isinstance(kind, type)), key=lambda kind: kind in named
    )  # abstract ones last
    public = (c for c in classes if not c.__name__.startswith("_"))
    return [c.__name__ for c in public if issubclass(c, Checked) or c.__module__ == "torch.nn.modules.loss"]


def _brief(value: Any) -> str:
    """Returns a setting on one line; of several objects their classes."""
    if isinstance(value, Checked):
        return repr(value)
    if isinstance(value, list | tuple):
        value = f"[{', '.join(type(entry).__name__ if isinstance(entry, Checked) else str(entry) for entry in value)}]"
    return folded(value, 60)


def _shown(value: Any) -> str:
    """Returns a value on one line."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not (value is None or isinstance(value, str | Real | Sequence | Mapping | os.PathLike)):
        return f"a {type(value).__name__}"
    return f"{folded(value):.60}"
