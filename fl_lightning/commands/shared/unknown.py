"""Explains unknown settings, options and classes: the nearest ones, or how to give one of another package."""

import ast
import os
import re
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_lightning.commands.shared.arguments import PARTS
from fl_lightning.commands.shared.index import entry, fitting_classes, keys_of, setting_names
from fl_lightning.core import OF_LIGHTNING, SYNONYMS, callback_of_lightning, folded, similar

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
WHERE = {"data": ("torchvision", "datasets", "MNIST"), "model.optimizer": ("torch", "optim", "Adam")}
"""Packages and modules whose classes `FOREIGN` tells how to give, and the one that it has as an example."""
MOST = 300
"""Letters of the parser's own words that a message shows."""


class ArgumentsError(Exception):
    """The parser's own message, of many lines."""


def unknown_option(path: str, name: str, message: str) -> str:
    """Returns the message for a setting that a class does not have.

    Args:
        path: The key above the setting.
        name: The setting.
        message: The parser's own words.
    """
    *above, leaf = f"{path}.{name}".strip(".").split(".")
    value = first_of(rf"'{re.escape(leaf)}': ([^,}}]+)", message) or first_of(r"val='([^']*)'", message)
    if nested := re.findall(r"NestedArg\(key='([^']+)'", message):  # from the command line; the outermost is the last
        above = [*(above[:1] if "." in nested[-1] else above), *nested[-1].split(".")[:-1]]
    elif (inner := keys_above(given_value(message), leaf)) is not None:  # from a file
        above = [*first_of(r'Parser key "([^"]+)', message).split("."), *inner]
    if above[:1] == ["parameters"] or [*above, leaf] in (["program"], ["method"]):
        return f"{above[0] if above else leaf}: a sweep's file is no config; give it to `fl-lightning sweep`"
    inside, given = above[:1] in (["model"], ["data"], ["trainer"]), ".".join([*above, leaf])
    near = [] if above else similar(leaf, PARTS, cutoff=0.8)
    near = near or meant(given)
    kinds = [k for k in fitting_classes(".".join(above), ()) if leaf in setting_names(k)] if above[1:] else []
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    top = "" if inside or (near and not above) else "; settings stand under model, data and trainer"
    first = 1 + (above[:1] == ["trainer"])  # the trainer is no choice of classes
    chain = [f"--{'.'.join(above[:n])}.help=CLASS" for n in range(first, len(above) + 1) if inside]
    shown = f"`fl-lightning fit {' '.join(chain) or '--help=all'}` shows them"
    of = " of this class" if not hint and given in keys_of(leaf) else ""
    if kinds:
        of, hint = " of this class", f" (one of {', '.join(kinds[:3])}, which --{'.'.join(above)} names before it)"
    return f"{given}{f' = {value}' if value else ''}: no such setting{of}{hint}{top}; {shown}"


def unknown_of(command: str, name: str, value: str) -> str | None:
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
    stem = above.split(".")
    near = {key: max(n for n in range(len(stem) + 1) if key.split(".")[:n] == stem[:n]) for key in keys}
    found = [key for key in keys if near[key] == max(near.values())]
    return found[:1] if slip else found


def unknown_class(path: str, name: str, wanted: str) -> str:
    """Returns the message for a class that does not exist.

    Args:
        path: The key of the setting.
        name: The class.
        wanted: The parser's own words about the classes that fit.
    """
    bases = set(re.findall(r"fl_lightning(?:\.\w+)*\.([A-Z]\w*)", first_of("Subtypes: (.*)", wanted)))
    known = fitting_classes(path, bases)
    if name.casefold() == "none":
        return f"{path} = {name}: no such class; null stands for none"
    if name[:1] in ("{", "["):
        return f"{path} = {name}: no such class; a mapping is {{class_path: NAME}}, with a space after the colon"
    if re.search(r"[/:]|\.py\b", name):
        dotted = re.sub(r"\.py\b", "", name).strip("./").replace("/", ".").replace(":", ".")
        dotted += ".CLASS" * ("." not in dotted)
        return f"{path} = {name}: no dotted path of a class; give one, such as {dotted}"
    method, *parts = name.split("+")  # as the papers' tables name it
    keys = {
        part: key for key in ("model.ascent", "model.averaging") for part in parts if part in fitting_classes(key, ())
    }
    if method in known and parts and len(keys) == len(parts):
        return f"{path} = {name}: no such class; give --{path} {method} " + " ".join(f"--{keys[p]} {p}" for p in parts)
    if path == "trainer.callbacks" and name in OF_LIGHTNING:
        return callback_of_lightning(name)
    near = similar(name, known)
    choice = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known or sorted(bases))}."
    remedy = FOREIGN.get(path, "A class of your own goes by its dotted path")
    if path in WHERE:
        package, module, example = WHERE[path]
        home = find_spec(package)  # read and not imported, which takes seconds
        text = Path(home.origin).with_name(module).joinpath("__init__.py").read_text() if home and home.origin else ""
        remedy = remedy.replace(example, name) if re.search(rf"\b{re.escape(name)}\b", text) else remedy
    return f"{path} = {name or repr('')}: no such class; {choice} {remedy[:1].upper()}{remedy[1:]}"


def import_problem(name: str) -> str:
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


def given_value(message: str) -> Any:
    """Returns the outermost value that the parser shows; None if it shows none."""
    try:
        return ast.literal_eval(re.findall(r"Given value: (.*)", message)[-1])
    except (IndexError, SyntaxError, ValueError):
        return None


def keys_above(tree: Any, name: str) -> list[str] | None:
    """Returns the keys that lead to ``name`` in a mapping."""
    trees: list[tuple[list[str], Any]] = [([], tree)]
    for path, tree in trees:
        if isinstance(tree, dict):
            if name in tree:
                return [key for key in path if key != "init_args"]
            trees += [([*path, key], value) for key, value in tree.items()]
    return None


def first_of(pattern: str, text: str) -> str:
    """Returns the first group of a pattern where it is found in a text of many lines; else an empty text."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""
