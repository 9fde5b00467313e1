"""Explains errors of the command line in one line each: the key, the value, and the remedy."""

import ast
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.commands.shared.arguments import PARTS, prepare
from fl_lightning.commands.shared.configs import config_names
from fl_lightning.commands.shared.index import (
    entry,
    fitting_classes,
    help_of,
    index,
    keys_of,
    named_classes,
    options_of,
    setting_names,
)
from fl_lightning.core import SYNONYMS, UserError, folded, similar

FOREIGN = {
    "data": "another data set of torchvision goes by TorchvisionData, as in --data TorchvisionData --data.name MNIST",
    "model.optimizer": "an optimizer of torch.optim goes by TorchOptimizer, as in "
    "--model.optimizer TorchOptimizer --model.optimizer.name Adam",
    "model.loss": "a loss of torch.nn goes by its name, such as CrossEntropyLoss",
    "trainer.callbacks": "EarlyStopping of Lightning goes by lightning.pytorch.callbacks.EarlyStopping",
    "trainer.loggers": "another logger of Lightning goes by its dotted path, as in "
    "--trainer.loggers+=lightning.pytorch.loggers.CometLogger",
}
"""How classes of other packages are named, by the key of the setting."""
CLASS_KEYS = ("class_path", "init_args")
"""Keys of a class in a config."""
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
"""Types of Python in words."""
MOST = 300
"""Letters of the parser's own words that a message shows."""


class ArgumentsError(Exception):
    """The parser's own message, of many lines."""


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
    # what jsonargparse raises while it builds the classes
    if not isinstance(error, (ArgumentsError, UnicodeDecodeError)) and not message.startswith("Does not validate"):
        return None
    # where several classes are tried, only those that know the option count, and each of them once
    for name in {*re.findall(r'- Parser key "(\w+)":', message)}:
        message = re.sub(rf"^ *- Option '{name}' is not accepted\n", "", message, flags=re.MULTILINE)
    message = re.sub(r'( *- Parser key "\w+":\n.*\n)\1+', r"\1", message)
    found = re.findall(r'(?:Parser key "|Group \')([^"\']+)', message)
    keys = [key for key, _ in groupby(found)]  # a key stands there once for each class that is tried
    above = ".".join(keys)
    nested = [".".join([*keys[:1], key]) for key in re.findall(r"NestedArg\(key='([^']+)'", message)]
    path = max([above, *nested], key=lambda key: key.count("."))  # as it was given, or deeper within a value
    if re.search("Problems parsing config|Unexpected config|codec can't decode", message):
        what = folded(re.sub(r"Problems parsing config:|(?<= )in \"<\w+ string>\",|: *\Z", "", message), MOST)
        remedy = "" if "; " in what else "; give YAML with model, data and trainer"
        return f"config = {' or '.join(configs)}: {what}{remedy}"
    if match := re.search(r"Invalid content in sub-config file (\S+\.py):", message):
        return _unknown_class(path, match[1], "")
    if "Unable to load config" in message:
        return f"{keys[0]} = {_first('config .(.*).$', message):.60}: give a mapping of settings"
    if line := next(_misshapen(keys[0] if keys else "", _given(message)), None) or _classless(above, message):
        return line
    name = _first(r"Given value: (?:.*?(?:'class_path': |val=)')?([A-Za-z_][\w.]*\.[A-Z]\w*)", message)
    if problem := _import_problem(name) if name else "":
        return f"{path} = {name}: {problem}; mend this file, or give another class"
    if match := re.search(r"Problem with given class_path '([\w.]+)':\s+(.*)", message):
        remedy = f"; check that Python can import '{match[1].rpartition('.')[0]}'" if "No module" in match[2] else ""
        return f"{path or 'class_path'} = {match[1]}: {folded(match[2], MOST)}{remedy}"
    if match := re.search(r"-(?:-([\w.]+))?\.help: .*import path string: *(.*)", message):
        path = ".".join([*keys[:1], match[1]])
        return f"{path}.help = {_unknown_class(path, match[2], '').partition(' = ')[2]}"
    if match := re.search(r"import path (?:string|format): *(.*)", message):
        return _unknown_class(path, match[1], message[: match.start()].rpartition("Parser key")[2])
    if match := re.search(r"(?:Option|accept option) '([^']+)'", message):
        return _unknown_option(above, match[1], message)
    if match := re.search(r"unrecognized arguments: (-*)([^\s=]+)[\s=]?(.*)", message):
        dashes, name, value = match.groups()
        if dashes == "--":
            return _unknown_of(command, name, value) or _unknown_option("", name, f"val='{value}'")
        options = entry(command)["options"]
        if name in config_names() and "config" in options:
            return f"{name}: give a config as --config {name}"
        if not entry(command)["places"] and set(options) <= {"help"}:
            return f"{name}: `fl-lightning {command}` takes no arguments; leave it out"
        run = name.endswith(".ckpt") or os.path.isdir(name)
        config = "config" if "config" in options and name.endswith((".yaml", ".yml")) else ""
        option = "ckpt_path" if run and "ckpt_path" in options else config
        given = message[match.start(2) :].split()[0]
        if not option and not dashes and "=" not in given:
            hints = {"config": "a config goes by --config, ", "folder": f"--folder {name} shows a part, "}
            other = next((hint for known, hint in hints.items() if known in options), "")
            return f"{name}: a value without an option; {other}a list has commas, as in --seeds 0,1,2"
        example = given if "=" in given else f"{option or 'NAME'}={'VALUE' if dashes else name}"
        return f"{dashes}{name}: no option; options have two dashes, as in --{example}"
    if match := re.search(r"argument --([\w.]+): expected one argument", message):
        return f"{match[1]}: missing; give a value"
    if match := re.search(r"arguments are required: (.*)", message):
        if "ckpt_path" in match[1].split(", "):
            return "ckpt_path: missing; give a checkpoint, such as --ckpt_path runs/.../checkpoints/last.ckpt"
        if not path and match[1] not in ("data, model", "data", "model"):
            return f"{match[1]}: missing; {_places(command, match[1])}see `fl-lightning {command} --help`"
        names = ", ".join(f"--{path}.{name}".replace("--.", "--") for name in match[1].split(", "))
        instead = "" if "." in path else ", --config (such as quickstart) or --ckpt_path (runs/...)"
        return f"{names}: missing; give a value{instead}"
    if match := re.search(r"^ *- (\S+ = \w+: needs .*)", message, re.M):  # a class whose package is missing
        return match[1]
    if match := re.search(
        r"Expected an? (?:<class '|typing\.)?(?!path)(.+?)(?:'>)?(?:\. Got value: (.*))?$", message, re.M
    ):
        value = match[2] or _first(r"Given value: (.*)", message)
        if match[1].endswith("is abstract") and re.fullmatch(r"[\w.]+\.\w+", value):
            kind: Any = getattr(import_module(value.rpartition(".")[0]), value.rpartition(".")[2])
            return f"{path} = {value}: an abstract class; define {', '.join(sorted(kind.__abstractmethods__))}"
        own = re.findall(r"^ *- (?!Expected|a |Does not validate)(.+)", message, re.M)
        if match[1] == "NoneType" and own:  # raised by the class itself
            if kind := next(
                filter(None, (re.search(r"subclass of (\w+)|is not iterable", line) for line in own)), None
            ):
                value = _first(r"Given value: (?:NestedArg\(.*?val=)?(.*?)\)?$", message).strip("'")
                remedy = FOREIGN.get(path, "") if re.fullmatch(r"[\w.]+", value) else ""
                early = "; --config, if there is one, goes first" if "NestedArg(key=" in message else ""
                remedy = remedy or f"give its class by name or dotted path{early}"
                return f"{path} = {value:.60}: no {kind[1] or 'class'}; {remedy}"
            what = re.sub(r"^'[^']*'$", r"KeyError: \g<0>", folded(own[-1], MOST))
            return what if re.match(r"[\w.]+ = ", what) and not path else f"{path or 'model, data or trainer'}: {what}"
        if (choices := re.findall(r"'(.+?)'", match[1])) and match[1].startswith("Literal"):
            return f"{path} = {value:.60}: choose from {', '.join(choices)}"
        name, listed = value.strip("[]"), match[1].rpartition(".")[2] in ("list", "Sequence")
        if listed and path in FOREIGN and "{" not in name and name not in fitting_classes(path, ()):
            return _unknown_class(path, name, "")
        appended = "" if "{" in name else f", or --{path}+={name:.60}"
        remedy = f"; give [{name:.60}]{appended}" if listed else ""
        return f"{path} = {value:.60}: expected {WORDS['list'] if listed else WORDS.get(match[1], match[1])}{remedy}"
    return folded(message, MOST)


def _unknown_option(path: str, name: str, message: str) -> str:
    *above, leaf = f"{path}.{name}".strip(".").split(".")
    value = _first(rf"'{re.escape(leaf)}': ([^,}}]+)", message) or _first(r"val='([^']*)'", message)
    if nested := re.findall(r"NestedArg\(key='([^']+)'", message):  # from the command line; the outermost is the last
        above = [*(above[:1] if "." in nested[-1] else above), *nested[-1].split(".")[:-1]]
    elif (inner := _find(_given(message), leaf)) is not None:  # from a file
        above = [*_first(r'Parser key "([^"]+)', message).split("."), *inner]
    if above[:1] == ["parameters"] or [*above, leaf] in (["program"], ["method"]):
        return f"{above[0] if above else leaf}: a sweep's file is no config; give it to `fl-lightning sweep`"
    inside, given = above[:1] in (["model"], ["data"], ["trainer"]), ".".join([*above, leaf])
    near = [] if above else similar(leaf, PARTS, cutoff=0.8)
    near = near or meant(given)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    top = "" if inside or (near and not above) else "; settings stand under model, data and trainer"
    first = 1 + (above[:1] == ["trainer"])  # the trainer is no choice of classes
    chain = [f"--{'.'.join(above[:n])}.help=CLASS" for n in range(first, len(above) + 1) if inside]
    shown = f"`fl-lightning fit {' '.join(chain) or '--help=all'}` shows them"
    of = " of this class" if not hint and given in keys_of(leaf) else ""
    return f"{given}{f' = {value}' if value else ''}: no such setting{of}{hint}{top}; {shown}"


def _unknown_of(command: str, name: str, value: str) -> str | None:
    """Returns the message for an option that a subcommand does not have; None where a setting of a run may be meant."""
    own = [option for option in entry(command)["options"] if "." not in option and option not in ("help", *PARTS)]
    near = similar(name, own)
    if entry(command)["complete"] and (not near or meant(name)):
        return None
    listed = f"; choose from {', '.join(f'--{option}' for option in own)}" if own else ""
    hint = f" (did you mean --{near[0]}?)" if near else listed
    return f"{name}{f' = {value}' if value else ''}: no such option{hint}; see `fl-lightning {command} --help`"


def meant(given: str) -> list[str]:
    """Returns the keys of the settings that a wrong key may mean: those of its name, or of names like it.

    Of several keys, those count that stand nearest to where the wrong one stands.

    Args:
        given: A key that no setting of the chosen classes has.
    """
    above, _, leaf = given.replace("-", "_").casefold().rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)
    keys = [leaf] if "." in leaf else keys_of(leaf)
    if not keys and len(leaf) > 2:  # those beside it that contain the word
        beside = (key for name in setting_names() if leaf in name for key in keys_of(name))
        keys = sorted(key for key in beside if above and key.rpartition(".")[0] == above)
    if slip := not keys:
        keys = [key for name in similar(leaf, sorted(setting_names()), cutoff=0.66) for key in keys_of(name)]
    keys = [key for key in keys if key != given and not any(key.startswith(f"{short}.") for short in keys)]
    near = {key: _shared(key.split("."), above.split(".")) for key in keys}
    found = [key for key in keys if near[key] == max(near.values())]
    return found[:1] if slip else found


def _shared(one: list[str], other: list[str]) -> int:
    """Returns how many parts two keys share from their beginning."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def _unknown_class(path: str, name: str, wanted: str) -> str:
    bases = set(re.findall(r"fl_lightning(?:\.\w+)*\.([A-Z]\w*)", _first("Subtypes: (.*)", wanted)))
    known = fitting_classes(path, bases)
    if name.casefold() == "none":
        return f"{path} = {name}: no such class; null stands for none"
    if name[:1] in ("{", "["):
        return f"{path} = {name}: no such class; a mapping is {{class_path: NAME}}, with a space after the colon"
    if re.search(r"[/:]|\.py\b", name):
        dotted = re.sub(r"\.py\b", "", name).strip("./").replace("/", ".").replace(":", ".")
        dotted += ".CLASS" * ("." not in dotted)
        return f"{path} = {name}: no dotted path of a class; give one, such as {dotted}"
    near = similar(name, known)
    choice = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known or sorted(bases))}."
    remedy = FOREIGN.get(path, "A class of your own goes by its dotted path")
    return f"{path} = {name or repr('')}: no such class; {choice} {remedy[:1].upper()}{remedy[1:]}"


def _given(message: str) -> Any:
    """Returns the outermost value that the parser shows; None if it shows none."""
    try:
        return ast.literal_eval(re.findall(r"Given value: (.*)", message)[-1])
    except (IndexError, SyntaxError, ValueError):
        return None


def _misshapen(path: str, tree: Any) -> Iterator[str]:
    """Yields what is wrong with the form of classes and their settings in a value of a config.

    Args:
        path: The key of the value.
        tree: The value.
    """
    if isinstance(tree, list):
        for each in tree:
            yield from _misshapen(path, each)
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
    value = _first(r"Given value: (\{.*\})$", message)
    names = re.findall(r"'(\w+)': ", value.replace("'init_args': {", ""))
    choices = [kind for kind in fitting_classes(path, ()) if {*names} & setting_names(kind)]
    choices.sort(key=lambda kind: -len({*names} & setting_names(kind)))
    if not choices or "'class_path'" in value:
        return None
    form = f"{{class_path: NAME, init_args: ...}}, such as {' or '.join(choices[:3])}"
    return f"{path} = {value:.60}: class_path is missing; give {form}"


def _import_problem(name: str) -> str:
    """Returns where and why a class's module cannot be imported, or that the class is not in it; else an empty text."""
    module, _, wanted = name.rpartition(".")
    try:
        if hasattr(imported := import_module(module), wanted):
            return ""
    except Exception as error:  # whatever the module raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return ""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.isfile(frame.filename)]
        at: Any = error if isinstance(error, SyntaxError) else frames[-1]
        return f"{at.filename}, line {at.lineno}: {type(error).__name__}: {folded(getattr(error, 'msg', error), MOST)}"
    own = [each for each in dir(imported) if each[:1].isupper()]
    has = f"; it has {', '.join(similar(wanted, own) or own[:5])}" if own else ""
    return f"module '{module}' has no attribute '{wanted}'{has}"


def _find(tree: Any, name: str) -> list[str] | None:
    """Returns the keys that lead to ``name`` in a mapping."""
    trees: list[tuple[list[str], Any]] = [([], tree)]
    for path, tree in trees:
        if isinstance(tree, dict):
            if name in tree:
                return [key for key in path if key != "init_args"]
            trees += [([*path, key], value) for key, value in tree.items()]
    return None


def _places(command: str, names: str) -> str:
    """Returns what a subcommand's help says of some of its arguments that go by their place."""
    shown = help_of(command)
    texts = [_first(rf"^  {name.upper()}\s+(\S[^(]*)\.\s+\(", shown) for name in names.split(", ")]
    found = [f"{text[:1].lower()}{text[1:]}" for text in map(folded, texts) if text]
    return f"give {'; '.join(found)}; " if found else ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


DOTTED = re.compile(r"(?<![\w./])(?!fl_lightning\.)[A-Za-z_]\w*\.[A-Za-z_]")
"""Is found in the dotted path of a class that is not the package's; its module may define further classes."""
BY_PARSER = re.compile(r"class_path|init_args|dict_kwargs|\.help$|^(trainer|h|help)$")
"""Is found in the name of an option that only the parser understands."""


def check_early(command: str, *args: str) -> None:
    """Refuses names of configs, classes and settings that are wrong in any case; the parser checks what passes.

    Args:
        command: The subcommand.
        args: Its arguments.

    Raises:
        UserError: If there is no such config.
        ArgumentsError: If there is no such class or setting; the message is in the parser's words.
    """
    known, options = entry(command), options_of(command)
    if not known["complete"]:
        return
    given, chosen, unknown = prepare(args), dict[str, str](), list[str]()
    for before, arg in pairwise(["", *given]):
        name, _, value = arg.removeprefix("--").partition("=")
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0].removesuffix("+")
        if name == "config":
            try:
                text = re.sub(r"#.*", "", Path(value).read_text(encoding="utf-8"))
                chosen |= named_classes(yaml.safe_load(text))
            except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
                return
        else:
            text = value
        if DOTTED.search(text) or BY_PARSER.search(name) or re.match("-[^-]", arg):
            return
        if not arg.startswith("--"):
            if before in unknown or not (known["places"] or (before.startswith("--") and "=" not in before)):
                unknown.append(arg)
        elif part not in PARTS or part == "trainer":
            if f"{part}.{key}".strip(".") not in options:
                unknown.append(arg)
            elif key == rest:
                _check_class(name, value, options[name])
        elif not rest:
            _check_class(name, value, options[name])
            chosen[part] = value.rpartition(".")[2]
        elif chosen.get(part) in index()["classes"]:
            settings = index()["classes"][chosen[part]]["settings"]
            if key not in settings and key == rest:
                inner = f"Option '{key}' is not accepted\nGiven value: NestedArg(key='{key}', val={value!r})"
                raise ArgumentsError(f'Parser key "{part}":\n{inner}')
            if key == rest:
                _check_class(name, value, settings[key])
    if unknown:
        raise ArgumentsError(f"unrecognized arguments: {' '.join(unknown)}")


def _check_class(path: str, name: str, setting: dict[str, Any]) -> None:
    """Refuses the name of a class that neither the package nor a file has."""
    known = name in index()["classes"] or name in index()["others"] or os.path.exists(name)
    own = "classes" in setting or (path not in FOREIGN and fitting_classes(path, ()))  # a net is any Module
    closed = own and not {"list", "open"} & {*setting}
    if closed and re.fullmatch(r"[A-Za-z_]\w*", name) and not known and yaml.safe_load(name) == name:
        bases = " ".join(f"fl_lightning.{base}" for base in setting.get("classes", ()))
        raise ArgumentsError(f'Parser key "{path}":\nSubtypes: {bases}\nExpected a dot import path string: {name}')
