"""Explains errors of the command line in one line each: the key, the value, and the remedy."""

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain, groupby
from typing import Any

from fl_lightning.commands.shared.arguments import config_names
from fl_lightning.commands.shared.index import (
    FOREIGN,
    MOST,
    PARTS,
    ArgumentsError,
    entry,
    first_of,
    fitting_classes,
    given_value,
    help_of,
    import_problem,
    index,
    keys_above,
    setting_names,
    unknown_class,
    unknown_of,
    unknown_option,
)
from fl_lightning.core import UserError, callback_of_lightning, folded, similar

CLASS_KEYS = ("class_path", "init_args")
"""Keys of a class in a config."""
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
"""Types of Python in words."""


def find_user_error(error: BaseException | None) -> UserError | None:
    """Returns the user error that an exception was raised from, if any."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def explain(error: Exception, configs: Sequence[str] = (), command: str = "fit") -> str | None:
    """Returns one line for a mistake of the user, or None if the error is another.

    The commonest mistakes have a message of their own; others have the parser's message with folded white space.

    Args:
        error: What was raised.
        configs: Config files that were given.
        command: The subcommand.
    """
    if (mistake := find_user_error(error)) is not None:
        return "; ".join([str(mistake), *getattr(mistake, "__notes__", ())])
    if isinstance(error, OSError):
        file = "a file" if error.filename is None else repr(os.fsdecode(error.filename))
        return f"{file}: {error.strerror or error}; check this file or folder"
    message = str(error)
    # the latter is what jsonargparse raises while it builds the classes
    if not isinstance(error, (ArgumentsError, UnicodeDecodeError)) and not message.startswith("Does not validate"):
        return None
    # where several classes are tried, only those that know the option count, and each of them once
    for name in {*re.findall(r'- Parser key "(\w+)":', message)}:
        message = re.sub(rf"^ *- Option '{name}' is not accepted\n", "", message, flags=re.MULTILINE)
    message = re.sub(r'( *- Parser key "\w+":\n.*\n)\1+', r"\1", message)
    refusal = _Refusal(message, configs, command)
    rules = ((rule, refusal.find(pattern)) for pattern, rule in RULES)
    return next(filter(None, (rule(refusal, match) for rule, match in rules if match)), folded(message, MOST))


@dataclass(frozen=True)
class _Refusal:
    """What the parser refuses.

    Attributes:
        message: The parser's own words.
        configs: Config files that were given.
        command: The subcommand.
    """

    message: str
    configs: Sequence[str]
    command: str

    def find(self, pattern: str) -> re.Match[str] | None:
        """Returns where a pattern is found in the words, line by line."""
        return re.search(pattern, self.message, re.MULTILINE)

    @cached_property
    def keys(self) -> list[str]:
        """Keys that lead to the value, from the outermost; the words repeat a key for each class that is tried."""
        return [key for key, _ in groupby(re.findall(r'(?:Parser key "|Group \')([^"\']+)', self.message))]

    @cached_property
    def above(self) -> str:
        """The key of the value in which the parser fails."""
        return ".".join(self.keys)

    @cached_property
    def path(self) -> str:
        """The key as it was given, or deeper within a value."""
        if len(self.keys) == 2 and (above := keys_above(given_value(self.message), self.keys[1])):  # from a file
            return ".".join([self.keys[0], *above, self.keys[1]])
        nested = [".".join([*self.keys[:1], key]) for key in re.findall(r"NestedArg\(key='([^']+)'", self.message)]
        return max([self.above, *nested], key=lambda key: key.count("."))


def _unreadable_config(refusal: _Refusal, match: re.Match[str]) -> str:
    words = re.sub(r"Problems parsing config:|(?<= )in \"<\w+ string>\",|: *\Z", "", refusal.message)
    problem = folded(words, MOST)
    remedy = "" if "; " in problem else "; give YAML with model, data and trainer"
    return f"config = {' or '.join(refusal.configs)}: {problem}{remedy}"


def _callback_of_lightning(refusal: _Refusal, match: re.Match[str]) -> str | None:
    if refusal.path != "trainer.callbacks":
        return None
    text = " ".join(re.findall(r"(?:Given value|[Ii]mport path).*", refusal.message))
    names = re.findall(r"\b(lightning\.pytorch|pytorch_lightning)\.callbacks\.(?:[a-z_]+\.)?([A-Z]\w*)", text)
    theirs = import_module("lightning.pytorch.callbacks")
    ours = ("lightning.pytorch", "EarlyStopping")
    return next(
        (callback_of_lightning(name) for package, name in names if hasattr(theirs, name) and (package, name) != ours),
        None,
    )


def _form_of_a_class(refusal: _Refusal, match: re.Match[str]) -> str | None:
    key = refusal.keys[0] if refusal.keys else ""
    outer, inner = given_value(refusal.message), given_value(refusal.message, 0)
    misshapen = next(chain(_misshapen(key, outer), _misshapen(refusal.above, inner)), None)
    return misshapen or _classless(refusal.above, refusal.message)


def _failed_import(refusal: _Refusal, match: re.Match[str]) -> str | None:
    problem = import_problem(match[1])
    return f"{refusal.path} = {match[1]}: {problem}; mend this file, or give another class" if problem else None


def _problem_of_a_class(refusal: _Refusal, match: re.Match[str]) -> str:
    remedy = _import_of(match[1]) if "No module" in match[2] else ""
    return f"{refusal.path or 'class_path'} = {match[1]}: {folded(match[2], MOST)}{remedy}"


def _import_of(name: str) -> str:
    module, _, _ = name.rpartition(".")
    return f"; start in the folder that holds {module.partition('.')[0]}, or check that Python can import '{module}'"


def _unknown_class_of_help(refusal: _Refusal, match: re.Match[str]) -> str:
    path = ".".join([*refusal.keys[:1], match[1]])
    return f"{path}.help = {unknown_class(path, match[2], '').partition(' = ')[2]}"


def _unrecognized(refusal: _Refusal, match: re.Match[str]) -> str:
    (dashes, name, value), command = match.groups(), refusal.command
    if dashes == "--":
        return unknown_of(command, name, value) or unknown_option("", name, f"val='{value}'")
    options = entry(command)["options"]
    if name in config_names() and "config" in options:
        return f"{name}: give a config as --config {name}"
    if not entry(command)["places"] and set(options) <= {"help"}:
        return f"{name}: `fl-lightning {command}` takes no arguments; leave it out"
    run = name.endswith(".ckpt") or os.path.isdir(name)
    config = "config" if "config" in options and name.endswith((".yaml", ".yml")) else ""
    option = "ckpt_path" if run and "ckpt_path" in options else config
    argument = refusal.message[match.start(2) :].split()[0]
    if not option and not dashes and "=" not in argument:
        hints = {"config": "a config goes by --config, ", "folder": f"--folder {name} shows a part, "}
        advice = next((hint for known, hint in hints.items() if known in options), "")
        return f"{name}: a value without an option; {advice}a list has commas, as in --seeds 0,1,2"
    example = argument if "=" in argument else f"{option or 'NAME'}={'VALUE' if dashes else name}"
    return f"{dashes}{name}: no option; options have two dashes, as in --{example}"


def _missing(refusal: _Refusal, match: re.Match[str]) -> str:
    if "ckpt_path" in match[1].split(", "):
        return "ckpt_path: missing; give a checkpoint, such as --ckpt_path runs/.../checkpoints/last.ckpt"
    path, command = refusal.path, refusal.command
    if not path and match[1] not in ("data, model", "data", "model"):
        return f"{match[1]}: missing; {_places(command, match[1])}see `fl-lightning {command} --help`"
    within = _within(first_of(r"Given value: (.*)", refusal.message[match.end() :]), match[1].split(", "))
    names = ", ".join(f"--{'.'.join([path, *within, name])}".replace("--.", "--") for name in match[1].split(", "))
    instead = "" if path else ", --config (such as quickstart) or --ckpt_path (runs/...)"
    return f"{names}: missing; give a value{instead}"


def _within(value: str, names: Sequence[str]) -> list[str]:
    """Returns the keys, within a value that the parser shows, of the class in which all these settings are None."""
    with suppress(SyntaxError, ValueError):
        places: list[tuple[list[str], ast.expr]] = [([], ast.parse(value, mode="eval").body)]
        for path, tree in places:
            settings = (
                {str(keyword.arg): keyword.value for keyword in tree.keywords} if isinstance(tree, ast.Call) else {}
            )
            if all(name in settings and ast.unparse(settings[name]) == "None" for name in names):
                return path
            places += [([*path, *([key] if key != "init_args" else [])], inner) for key, inner in settings.items()]
    return []


def _unexpected(refusal: _Refusal, match: re.Match[str]) -> str:
    path, message = refusal.path, refusal.message
    kind, value = match[1], match[2] or first_of(r"Given value: (.*)", message)
    nested = re.fullmatch(r"NestedArg\(key='([^']+)', val=(.*)\)", value)
    if nested and ("." in (above := path.removesuffix(f".{nested[1]}")) or above == "data"):
        return _of_no_class(above, nested[1], nested[2].strip("'"))
    if abstract := re.search(r"but ([\w.]*) ?is abstract$", kind):
        module, _, name = (class_path := abstract[1] or value).rpartition(".")
        module = module or first_of(rf"'([\w.]+)\.{name}'", message) or "fl_lightning"  # the declared base, or below it
        methods = getattr(import_module(module), name).__abstractmethods__
        return f"{path} = {class_path}: an abstract class; give one below it that defines {', '.join(sorted(methods))}"
    errors = re.findall(r"^ *- (?!Expected|a |Does not validate)(.+)", message, re.M)
    if kind == "NoneType" and errors:
        return _raised_by_a_class(path, message, errors)
    if (choices := re.findall(r"'(.+?)'", kind)) and kind.startswith("Literal"):
        remedy = _import_of(value) if re.fullmatch(r"[A-Za-z_][\w.]*\.\w+", value) else ""
        return f"{path} = {value:.60}: choose from {', '.join(choices)}{remedy}"
    name, listed = value.strip("[]"), kind.rpartition(".")[2] in ("list", "Sequence")
    if listed and path in FOREIGN and re.fullmatch(r"\w+", name) and name not in fitting_classes(path, ()):
        return unknown_class(path, name, "")
    appended = f", or --{path}+={name:.60}" if path.partition(".")[0] in PARTS and not re.search("[{,]", name) else ""
    remedy = f"; give [{name:.60}]{appended}" if listed else ""
    if kind == "int" and re.fullmatch(r"-?\d+\.0", value):  # also 1e3, as YAML reads it
        remedy = f"; write {value.removesuffix('.0')}"
    return f"{path} = {value:.60}: expected {WORDS['list'] if listed else WORDS.get(kind, kind)}{remedy}"


def _of_no_class(path: str, name: str, value: str) -> str:
    """Returns the line for a setting of a value that is no class, or of a class that is not given."""
    prefix, fitting = f"{path}.{name} = {value:.60}: ", fitting_classes(path, ())
    kinds = [kind for kind in fitting if name in setting_names(kind)]
    if path == "data":
        return f"{prefix}give its class first: --{path} {[*kinds, *fitting][0]}; --config, if there is one, goes first"
    fallback = f"{path} has no settings of its own; give --{path} VALUE"
    return prefix + (f"give its class first: --{path} {kinds[0]}" if kinds else fallback)


def _raised_by_a_class(path: str, message: str, errors: Sequence[str]) -> str:
    # other classes were tried, too
    errors = [line for line in errors if re.match(r"(trainer|model|data)\.[\w.]+ = ", line)] or errors
    tried = (re.search(r"subclass of (\w+)|is not iterable", line) for line in errors)
    if kind := next(filter(None, tried), None):
        value = first_of(r"Import path (\S+) does not", message)  # of a mapping
        value = value or first_of(r"Given value: (?:NestedArg\(.*?val=)?(.*?)\)?$", message).strip("'")
        remedy = FOREIGN.get(path, "") if re.fullmatch(r"[\w.]+", value) else ""
        early = "; --config, if there is one, goes first" if "NestedArg(key=" in message else ""
        remedy = remedy or f"give its class by name or dotted path{early}"
        return f"{path} = {value:.60}: no {kind[1] or 'class'}; {remedy}"
    problem = re.sub(r"^'[^']*'$", r"KeyError: \g<0>", folded(errors[-1], MOST))
    return problem if re.match(r"[\w.]+ = ", problem) and not path else f"{path or 'model, data or trainer'}: {problem}"


RULES: tuple[tuple[str, Callable[[_Refusal, re.Match[str]], str | None]], ...] = (
    ("Problems parsing config|Unexpected config|codec can't decode", _unreadable_config),
    (
        r"Unable to load config .(.*).$",
        lambda refusal, match: f"{refusal.keys[0]} = {match[1]:.60}: give a mapping of settings",
    ),
    ("", _callback_of_lightning),
    ("", _form_of_a_class),
    (r"Given value: (?:.*?(?:'class_path': |val=)')?([A-Za-z_][\w.]*\.[A-Z]\w*)", _failed_import),
    (r"Problem with given class_path '([\w.]+)':\s+(.*)", _problem_of_a_class),
    (r"-(?:-([\w.]+))?\.help: .*import path string: *(.*)", _unknown_class_of_help),
    (
        r"import path (?:string|format): *(.*)",
        lambda refusal, match: unknown_class(
            refusal.path, match[1], refusal.message[: match.start()].rpartition("Parser key")[2]
        ),
    ),
    (
        r"(?:Option|accept option) '([^']+)'",
        lambda refusal, match: unknown_option(refusal.above, match[1], refusal.message),
    ),
    (r"unrecognized arguments: (-*)([^\s=]+)[\s=]?(.*)", _unrecognized),
    (r"argument --([\w.]+): expected one argument", lambda _, match: f"{match[1]}: missing; give a value"),
    (r"arguments are required: (.*)", _missing),
    (r"^ *- (\S+ = \w+: needs .*)", lambda _, match: match[1]),  # a class whose package is missing
    (r"Expected an? (?:<class '|typing\.)?(?!path)(.+?)(?:'>)?(?:\. Got value: (.*))?$", _unexpected),
)
"""Kinds of mistakes: what the parser says of them, and the line for it, or None. The first that has a line counts."""


def _misshapen(path: str, tree: Any) -> Iterator[str]:
    """Yields what is wrong with the form of classes and their settings in a value of a config.

    Args:
        path: The key of the value.
        tree: The value.
    """
    if isinstance(tree, list):
        for element in tree:
            yield from _misshapen(path, element)
    if not isinstance(tree, dict):
        return
    settings = tree.get("init_args", {})
    for name, value in tree.items():
        near = similar(str(name), [key for key in CLASS_KEYS if key not in tree], cutoff=0.75)
        if near:
            yield f"{path}.{name}: no key of a class; did you mean {near[0]}?"
        elif "class_path" in tree and name not in (*CLASS_KEYS, "dict_kwargs"):
            form = f"{{class_path: {tree['class_path']}, init_args: {{{name}: {value}}}}}"
            yield f"{path}.{name} = {value!s:.60}: the settings of a class stand under init_args, as in {form:.200}"
        elif len(tree) == 1 and name in index()["classes"]:
            yield f"{path} = {{{name}: ...}}: give {{class_path: {name}, init_args: ...}}"
    if settings is None:
        yield f"{path}.init_args: empty; give settings, or leave it out"
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _misshapen(f"{path}.{name}", value)


def _classless(path: str, message: str) -> str | None:
    """Returns the line for settings of a class without the class, at the key where the parser fails."""
    value = first_of(r"Given value: (\{.*\})$", message)
    names = re.findall(r"'(\w+)': ", value.replace("'init_args': {", ""))
    choices = [kind for kind in fitting_classes(path, ()) if {*names} & setting_names(kind)]
    choices.sort(key=lambda kind: -len({*names} & setting_names(kind)))
    if not choices or "'class_path'" in value:
        return None
    form = f"{{class_path: NAME, init_args: ...}}, such as {' or '.join(choices[:3])}"
    return f"{path} = {value:.60}: class_path is missing; give {form}"


def _places(command: str, names: str) -> str:
    """Returns what a subcommand's help says of some of its arguments that go by their place."""
    help_text = help_of(command)
    texts = [first_of(rf"^  {name.upper()}\s+(\S[^(]*)\.\s+\(", help_text) for name in names.split(", ")]
    descriptions = [f"{text[:1].lower()}{text[1:]}" for text in map(folded, texts) if text]
    return f"give {'; '.join(descriptions)}; " if descriptions else ""
