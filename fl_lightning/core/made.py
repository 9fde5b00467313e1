"""How objects were made, in the form of a config."""

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from inspect import BoundArguments, Parameter, signature
from itertools import islice
from numbers import Integral, Real
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.secrets import hidden

MADE = "_made_with"
"""Attribute of an object: its `Made`."""
OF_NO_FILE = re.compile(r"^(__main__|builtins)\.|\w+\.<locals>\.|[<>]")
"""What a description leaves out of a path."""
ARRAYS = ("torch.Tensor (", "numpy.ndarray (", "tuple (", "list (")
"""How descriptions of arrays, and of lists of them, begin."""
MOST = 1000
"""Entries of lists, all together, that a config holds; longer ones are described."""
LOOKED_AT = 1_000_000
"""Values of an array, or entries of a list, that a description depends on."""
DEPTH = 8
"""Depth of nested objects that a description depends on."""


@dataclass(frozen=True)
class Made:
    """How an object was made.

    Attributes:
        arguments: The arguments that its class takes, by name, defaults included.
        attributes: The attributes of these names when the object was made, as far as it had them, and of those that its
            class gave to a constructor which it extends; of an algorithm of the user's also its other numbers and text.
        form: Layers and weights of a net, without their values.
    """

    arguments: Mapping[str, Any]
    attributes: Mapping[str, Any]
    form: list[Any] | None = None

    @classmethod
    def note(cls, owner: object, calls: Sequence[BoundArguments]) -> None:
        """Notes how an object was made, in the object.

        Args:
            owner: The object.
            calls: The calls of its constructors, the outermost first. What one of them gives the next, and the caller
                has not given, is no argument of the class.
        """
        free, arguments, fixed = dict[str, Any](), dict[str, Any](), set[str]()
        for call in calls:
            passed = set(call.arguments)
            call.apply_defaults()
            further = None
            for name, parameter in [*call.signature.parameters.items()][1:]:
                value = call.arguments[name]
                if parameter.kind is Parameter.VAR_KEYWORD:
                    further = value
                elif call is not calls[0] and name in passed and name not in free:
                    fixed.add(name)
                elif name not in fixed and not (parameter.kind is Parameter.VAR_POSITIONAL and not value):
                    arguments.setdefault(name, value)
            if further is None:
                break
            free = free or further
        arguments |= {name: value for name, value in free.items() if name not in arguments}
        users = getattr(owner, "config_key", "") == "model" and not type(owner).__module__.startswith("fl_lightning.")
        plain = (n for n, v in vars(owner).items() if users and n[0] != "_" and isinstance(v, bool | Real | str))
        attributes = {name: vars(owner)[name] for name in (*arguments, *fixed, *plain) if name in vars(owner)}
        vars(owner)[MADE] = cls(arguments, attributes, _form(owner) if isinstance(owner, nn.Module) else None)

    @classmethod
    def of(cls, owner: object) -> "Made":
        """Returns how an object was made; of one that has not noted it, the attributes that its constructor names."""
        if MADE not in vars(owner):
            attributes = {name: vars(owner)[name] for name in signature(type(owner)).parameters if name in vars(owner)}
            return cls(attributes, attributes)
        return vars(owner)[MADE]  # type: ignore[no-any-return]

    def now(self, owner: object) -> dict[str, Any]:
        """Returns the arguments that would make the object as it is now: attributes may have been set since.

        An attribute that the object lacked when it was made changes nothing, unless its class says so; there is a
        warning. What its class has set, as FedSAM its ascent, is no argument, and is added if it was changed.
        """

        def value(name: str) -> Any:
            attribute, argument = vars(owner).get(name), self.arguments[name]
            if name not in self.attributes:
                if isinstance(attribute, bool | Real | str):
                    text = f"{type(owner).__name__}.{name} = {attribute}: set later, it changes nothing"
                    warn(f"{text}; give it to {type(owner).__name__}", stacklevel=2)
                return argument
            return argument if _as_before(attribute, self.attributes[name]) else attribute

        others = {name: vars(owner)[name] for name in self.attributes.keys() - {*self.arguments, "training"}}
        changed = {name: v for name, v in others.items() if not _as_before(v, self.attributes[name])}
        return {name: value(name) for name in self.arguments} | changed


def _changed(owner: object) -> bool:
    """Returns whether an argument of an object, or of its parts, has been set since it was made."""
    construction = getattr(owner, "__dict__", {}).get(MADE)
    return construction is not None and any(
        not _as_before(value, construction.arguments.get(name)) for name, value in construction.now(owner).items()
    )


def _as_before(value: object, before: object) -> bool:
    """Returns whether a value is what it was; numbers and text that are equal may be others after pickling."""
    equal = isinstance(value, bool | Real | str) and type(value) is type(before) and bool(value == before)
    return equal or (value is before and not _changed(value))


def config_of(trainer: object, model: object, data: object) -> dict[str, Any]:
    """Returns the config of a run that a program has made, without secrets; `as_setting` says what it holds."""
    config = {"trainer": as_setting(trainer)["init_args"], "model": as_setting(model), "data": as_setting(data)}
    return dict(hidden(config))


def as_setting(value: Any, weights: bool = True) -> Any:
    """Returns an argument as a config has it: plain values, and objects by ``class_path`` and ``init_args``.

    What YAML cannot say is described by a short text, which is the same for equal things in every process; see
    `described`. Of an argument ``net`` the weights do not count.
    """
    match value:
        case Enum():
            return value.name
        case str() | torch.dtype() | torch.device():
            return str(value)
        case None | bool():
            return value
        case np.bool_():
            return bool(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            settings = {str(key): as_setting(entry) for key, entry in value.items()}
            return settings if _is_short(settings) else described(value)
        case list() | tuple() | set() | frozenset():
            entries = [*map(as_setting, value)] if len(value) <= MOST else [None] * len(value)
            ordered = sorted(entries, key=str) if isinstance(value, set | frozenset) else entries
            return ordered if _is_short(ordered) else described(value)
        case np.ndarray() if value.dtype.kind in "iub" and value.size <= MOST:
            return value.tolist()
        case FunctionType() | BuiltinFunctionType() | type():
            return _path(value) if _is_importable(value) else described(value)
    kind = type(value)
    if kind.__module__ == "torch.nn.modules.loss":  # these keep all arguments but two, whose default is None
        arguments = {name: getattr(value, name, None) for name in signature(kind).parameters}
    elif hasattr(kind, "config_key") or (is_dataclass(value) and _arguments(kind) <= {*getattr(value, "__dict__", {})}):
        construction = Made.of(value)
        if construction.form is not None and construction.form != _form(value):
            return described(value, weights)  # its layers have been changed since
        arguments = construction.now(value) | _overriding(value)
    else:
        return described(value, weights)
    init_args = {name: as_setting(argument, weights and name != "net") for name, argument in arguments.items()}
    return {"class_path": _path(kind), **({"init_args": init_args} if init_args else {})}


def described(value: Any, weights: bool = True) -> str:
    """Returns a description of an object: its class, its size, and an identifier of its content.

    Args:
        value: The object.
        weights: Whether values of modules count, as those of a loss; of a net that is trained only shapes do.
    """
    parts = [f"id {hashlib.sha256(repr(_content(value, weights)).encode()).hexdigest()[:6]}"]
    if isinstance(value, nn.Module):
        parts.insert(0, f"{sum(p.numel() for p in value.parameters()):,} weights")
    elif isinstance(value, Tensor | np.ndarray):
        kind = value.dtype.name if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")
        parts.insert(0, f"{kind} {'x'.join(map(str, value.shape))}")
    elif isinstance(value, Sized):
        parts.insert(0, f"{len(value):,} entries")
    path = _path(value if isinstance(value, FunctionType | BuiltinFunctionType) else type(value))
    return f"{OF_NO_FILE.sub('', path)} ({', '.join(parts)})"


def _content(value: Any, weights: bool, depth: int = 0) -> Any:
    """Returns what tells an object apart from others of its class, as nested lists of text and numbers."""
    if value is None or isinstance(value, bool | Integral | Real | str):
        return value if value is None or isinstance(value, str) else float(value)
    path, content = _path(type(value)), partial(_content, weights=weights, depth=depth + 1)
    match value:
        case _ if depth == DEPTH:
            return path
        case Tensor():
            flat = value.detach().reshape(-1)
            sample = flat[:: -(-flat.numel() // LOOKED_AT) or 1].cpu().contiguous().view(torch.uint8).numpy()
            return [str(value.dtype), [*value.shape], hashlib.sha256(sample.data).hexdigest()]
        case np.ndarray() if not value.dtype.hasobject:  # torch has no text, dates, fields or other orders of bytes
            array = np.ascontiguousarray(value)
            sample = array.reshape(-1)[:: -(-array.size // LOOKED_AT) or 1].astype(array.dtype.newbyteorder("="))
            return [f"torch.{array.dtype.name}", [*array.shape], hashlib.sha256(sample.tobytes()).hexdigest()]
        case Mapping():
            return sorted(([str(key), content(entry)] for key, entry in value.items()), key=lambda pair: pair[0])
        case Sequence() | set() | frozenset() | np.ndarray():
            entries = [content(entry) for entry in islice(value, 0, None, -(-len(value) // LOOKED_AT) or 1)]
            return [len(value), sorted(entries, key=repr) if isinstance(value, set | frozenset) else entries]
        case CodeType():
            return [value.co_code.hex(), [*value.co_names], [content(constant) for constant in value.co_consts]]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [_path(value), content(value.__code__), content([value.__defaults__, value.__kwdefaults__, cells])]
        case type() | BuiltinFunctionType():
            return _path(value)
        case MethodType():
            return [content(value.__func__), content(value.__self__)]
        case partial():
            return [path, content([value.func, value.args, value.keywords])]
        case nn.Module():
            layers = [[name, content(_public(layer, weights))] for name, layer in value.named_modules()]
            values = [[name, content(v)] for name, v in value.state_dict().items()] if weights else []
            return [repr(_form(value)), layers, *values]
        case os.PathLike() | Enum():
            return str(value)
    return [path, content(_public(value, weights) if hasattr(value, "__dict__") else _pickled(value))]


def _form(net: nn.Module) -> list[Any]:
    """Returns layers and weights of a net, without their values."""
    weights = [(name, tuple(p.shape), p.requires_grad) for name, p in net.named_parameters()]
    return [[(name, _path(type(layer))) for name, layer in net.named_modules()], weights]


def _pickled(value: object) -> list[Any]:
    """Returns what an object without a ``__dict__``, such as a date or one with slots, is made of, as pickle has it."""
    try:
        return [*value.__reduce_ex__(4)[1:3]]
    except TypeError:
        return []


def _public(value: object, weights: bool) -> dict[str, Any]:
    """Returns an object's attributes, without private ones that are no arguments; of a layer those that torch keeps."""
    private = {f"{prefix}{name}" for name in _arguments(type(value)) for prefix in ("_", f"_{type(value).__name__}__")}
    attributes = {name: attribute for name, attribute in vars(value).items() if name[0] != "_" or name in private}
    if not isinstance(value, nn.Module):
        return attributes
    shapes = {n: list(v.shape) for n, v in attributes.items() if isinstance(v, Tensor) and not weights}
    return {n: shapes.get(n, v) for n, v in attributes.items() if n != "training"}


def _arguments(kind: type) -> set[str]:
    """Returns the names of a constructor's arguments, but for those that torch's modules keep otherwise."""
    try:
        return signature(kind).parameters.keys() - {"parameters", "buffers", "modules"}
    except ValueError:  # of a class that is not Python's
        return set()


def _overriding(owner: object) -> dict[str, Any]:
    """Returns the plain attributes of an object that stand in place of other ones of a class of the user's."""
    kinds = [kind for kind in type(owner).__mro__ if hasattr(kind, "config_key")]
    namespaces = [vars(kind) for kind in kinds if not kind.__module__.startswith("fl_lightning.")]
    plain = {n: v for n, v in vars(owner).items() if isinstance(v, bool | Real | str)}
    return {n: v for n, v in plain.items() for namespace in namespaces if n in namespace and namespace[n] != v}


def _is_short(entries: Any) -> bool:
    """Returns whether a config can hold entries: they are few, and none of them is a described array."""
    values = [*islice(leaves(entries), MOST + 1)]
    return len(values) <= MOST and not any(str(leaf).startswith(ARRAYS) for leaf in values)


def leaves(tree: Any) -> Iterator[Any]:
    """Yields the values of nested dicts and lists."""
    entries = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    if entries is None:
        yield tree
    else:
        for entry in entries:
            yield from leaves(entry)


def _path(kind: Any) -> str:
    """Returns the dotted path of a class or function, the shortest by which it can be imported."""
    module, name = getattr(kind, "__module__", None) or "builtins", getattr(kind, "__qualname__", str(kind))
    parts = module.split(".")
    packages = (".".join(parts[: n + 1]) for n in range(len(parts)))
    short = (package for package in packages if getattr(sys.modules.get(package), name, None) is kind)
    return f"{next(short, module)}.{name}"


def _is_importable(kind: Any) -> bool:
    module, name = kind.__module__ or "builtins", kind.__qualname__
    return module != "__main__" and getattr(sys.modules.get(module), name, None) is kind
