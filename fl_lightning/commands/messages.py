"""Errors of the command line as one line each: the key, the value, and the remedy."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fl_lightning.core.errors import UserError


class ArgumentsError(Exception):
    """What the parser says, in many lines."""


def find_user_error(error: BaseException | None) -> UserError | None:
    """The mistake behind an exception that a library raised from it."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def tell(error: Exception, configs: Sequence[str] = ()) -> str | None:
    """One line for a mistake of the user's; None if the error is not one.

    Args:
        error: What was raised.
        configs: Config files that were given.
    """
    if (mistake := find_user_error(error)) is not None:
        return str(mistake)
    # what a class raises while it is made reaches us as a ValueError that tries all members of a union
    if isinstance(error, UnicodeDecodeError):
        return f"config = {' or '.join(configs)}: no text; give a YAML file"
    theirs = isinstance(error, ArgumentsError) or str(error).startswith("Does not validate")
    return explain(str(error), configs) if theirs else None


def explain(message: str, configs: Sequence[str] = ()) -> str:
    """One line for what the parser says in many.

    Args:
        message: The parser's own message.
        configs: Config files that were given.
    """
    path = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    config = " or ".join(configs) or "(none)"
    if match := re.search(r"File does not exist: '([^']+)'", message):
        return f"config = {match[1]}: no such file; give the path of a YAML file"
    if match := re.search(r"Problems parsing config: (.*)", message, re.DOTALL):
        return f"config = {config}: not valid YAML ({one_line(match[1])}); check brackets, colons and indentation there"
    if match := re.search(r"Unexpected config: (.*)", message):
        return f"config = {config}: it holds '{match[1]:.40}'; give YAML with model, data and trainer"
    if match := re.search(r"(?:Option|accept option) '([^']+)'", message):
        return _unknown_option(path, match[1], message)
    if match := re.search(r"(?:import path string:|given class_path) '?([\w.]+)", message):
        return _unknown_class(path, match[1], message[: match.start()].rpartition("Parser key")[2])
    if match := re.search(r"arguments are required: (.*)", message):
        names = ", ".join(f"--{path}.{n}" if path else "--" + n.partition(".")[2] for n in match[1].split(", "))
        return f"{names}: missing; give a value, or a file by --config (such as configs/quickstart.yaml)"
    if match := re.search(r"unrecognized arguments: -*([^\s=]+)[\s=]?(.*)", message):
        return _unknown_option("", match[1], f"val='{match[2]}'")
    if "Expected a <class 'list'>" in message and (match := re.search(r"Given value: (.*)", message)):
        return f"{path} = {match[1]:.60}: expected a list; give [{match[1]:.60}], or --{path}+={match[1]:.60}"
    if "Not a valid subclass of" in message and (odd := _given(message).keys() - {"class_path", "init_args"}):
        name = min(odd)
        return f"{path}.{name} = {_given(message)[name]!s:.60}: put settings of the class under its init_args"
    if match := re.search(r"Expected an? (.+?)(?:\. Got value: (.*))?$", message, re.MULTILINE):
        given = match[2] or _first(r"Given value: (.*)", message)
        kind = _first(r"<class '([\w.]+)'>", match[1]) or match[1].removeprefix("typing.")
        own = [line for line in re.findall(r"^\s*- (.+)", message, re.MULTILINE) if not line.startswith("Expected")]
        if kind == "NoneType" and own:  # what the class itself raised
            return f"{path or 'model, data or trainer'}: {one_line(own[-1])}"
        return f"{path} = {given:.60}: expected {kind}"
    return one_line(message)


def one_line(text: str, limit: int = 300) -> str:
    """White space folded, and cut."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _unknown_option(path: str, name: str, message: str) -> str:
    nested = _first(r"NestedArg\(key='([^']+)'", message)
    if nested.endswith(f".{name}"):
        path = f"{path.partition('.')[0]}.{nested.removesuffix(f'.{name}')}"
    if (inner := _find(_given(message), name)) is not None:
        path = ".".join([path.partition(".")[0], *inner]) if path.startswith(("model", "data")) else path
    key = f"{path}.{name}" if path else name
    value = _first(rf"'{re.escape(name.split('.')[-1])}': ([^,}}]+)", message) or _first(r"val='([^']*)'", message)
    leaf = name.split(".")[-1]
    head = key.split(".")[0]
    owners = [c for c in _classes() if c.__name__ == "FederatedTrainer" or key.count(".") != 1 or head != "trainer"]
    near = difflib.get_close_matches(leaf, sorted({p for c in owners for p in _parameters(c)} - {leaf}), cutoff=0.7)
    top = "" if head in ("model", "data", "trainer") else "; settings stand under model, data and trainer"
    hint = f" ({_suggest(near)})" if near else ""
    parts = path.split(".")
    chain = [".".join(parts[:n]) for n in range(2 if head == "trainer" else 1, len(parts) + 1) if path]
    where = " ".join(f"--{p}.help=CLASS" for p in chain) or "--help"
    return f"{key}{f' = {value}' if value else ''}: no such setting{hint}{top}; `fl-lightning fit {where}` shows them"


def _unknown_class(path: str, name: str, told: str) -> str:
    if module := name.rpartition(".")[0]:
        return f"{path} = {name}: no such class; check that Python can import '{module}'"
    wanted = set(re.findall(r"fl_lightning(?:\.\w+)*\.([A-Z]\w*)", _first(r"Subtypes: (.*)", told)))
    fits = [c.__name__ for c in _classes() if not wanted or wanted & {base.__name__ for base in c.__mro__[1:]}]
    known = sorted({n for n in fits if not n.startswith("_")})
    near = difflib.get_close_matches(name, known, cutoff=0.6) or known
    return f"{path} = {name}: no such class; {_suggest(near)}, or give the dotted path of your own class"


def _given(message: str) -> dict[str, Any]:
    """The outermost value that the parser shows, if it is a mapping."""
    try:
        value = ast.literal_eval(re.findall(r"Given value: (.*)", message)[-1])
    except (IndexError, SyntaxError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _find(tree: dict[str, Any], name: str) -> list[str] | None:
    """Keys that lead to ``name`` in nested class_path and init_args."""
    if name in tree:
        return []
    for key, value in tree.items():
        if isinstance(value, dict) and (found := _find(value, name)) is not None:
            return found if key == "init_args" else [key, *found]
    return None


def _suggest(names: Sequence[str]) -> str:
    return f"did you mean {', '.join(names)}?" if len(names) < 4 else f"choose from {', '.join(names)}"


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _classes() -> Iterator[type]:
    """Every public class that a config can name."""
    import fl_lightning

    for name in fl_lightning.__all__:
        if inspect.isclass(value := getattr(fl_lightning, name)):
            yield value


def _parameters(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        if "__init__" in vars(base) and base.__module__.startswith("fl_lightning"):
            yield from list(inspect.signature(base.__init__).parameters)[1:]  # type: ignore[misc]
