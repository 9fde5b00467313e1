"""The index of the command line, and what it says of wrong names: neither torch nor Lightning is imported for that.

``index.json`` is made from the code by ``make renew``, and a test compares the two.
"""

import ast
import json
import os
import re
import traceback
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning.core import OF_LIGHTNING, SYNONYMS, callback_of_lightning, folded, require, similar
from fl_lightning.results.configs import flatten

FILE = Path(__file__).with_name("index.json")
PARTS = ("trainer", "model", "data")
"""Parts of a config."""

COMMON = """\
settings that people change, with examples:
  --config quickstart              A config: a name of `fl-lightning configs`,
                                   or a YAML file; later ones win.
  --model FedSAM                   Algorithm: a name of `fl-lightning list`.
  --model.net ResNet18GN           Network.
  --model.loss CrossEntropyLoss    Loss: one of torch.nn, or PixelCrossEntropy.
  --model.optimizer AdamW          Local optimizer.
  --model.optimizer.lr 0.1         Its learning rate.
  --model.optimizer.weight_decay 1e-4
  --data CIFAR10                   Data set.
  --data.num_clients 100           Clients that share the training data.
  --data.partition Dirichlet       How they share it.
  --data.partition.alpha 0.1       Concentration: a small one skews them.
  --data.batch_size 64             Samples of a local step.
  --trainer.max_rounds 100         Rounds.
  --trainer.clients_per_round 10   Clients of each round.
  --trainer.local_epochs 1         Epochs of a client in a round.
  --trainer.seed 0                 Seed of the weights and of all draws.
  --trainer.loggers+=WandbLogger   A logger beside metrics.csv.
  --trainer.name NAME              Folder of the runs, under runs/.

all settings:
  fl-lightning {command} --help=all               those of the trainer
  fl-lightning {command} --model.help=FedSAM      those of an algorithm
  fl-lightning {command} --data.help=CIFAR10      those of a data set
  fl-lightning {command} --config CONFIG --print_config    those of a config"""
"""The settings of a run in a subcommand's help."""


@cache
def index() -> Any:
    """Returns the index.

    Returns:
        ``algorithms``: ``heads``, ``rows`` and ``note`` of their table.
        ``classes``: of each public class its ``bases``, its ``key`` in a config, and its ``settings``.
        ``others``: names of the package's further classes.
        ``commands``: of each subcommand its ``options`` but those of the trainer, its number of positional arguments,
        ``places``, whether its arguments are ``complete`` settings of one run, and its ``help`` as places in ``texts``.
        An option or setting has, if any, the package's ``classes`` of its type, ``open`` if the type has others, too,
        its ``choices``, ``list`` if it is one, and argparse's ``nargs``.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def entry(command: str) -> dict[str, Any]:
    """Returns the entry of a subcommand, as `index` has it.

    Raises:
        UserError: If it is newer than the index.
    """
    record: dict[str, Any] = index()["commands"].get(command, {})
    require(bool(record), "subcommand", command, "newer than index.json; run `make renew`")
    return record


def options_of(command: str) -> dict[str, Any]:
    """Returns the options of a subcommand by name, as `index` has them, those of the trainer among them."""
    options = entry(command)["options"]
    trainer = index()["classes"]["FederatedTrainer"]["settings"] if "trainer" in options else {}
    return {**options, **{f"trainer.{name}": setting for name, setting in trainer.items()}}


def help_of(command: str, full: bool = False) -> str:
    """Returns the help of a subcommand, 80 columns wide.

    Args:
        command: The subcommand.
        full: Whether to list every setting of the trainer; otherwise `COMMON` takes the place of a run's settings.
    """
    texts = [index()["texts"][i] for i in entry(command)["help"]]
    if full or not entry(command)["complete"]:
        return "\n\n".join(texts)
    places = [text for text in texts if text.startswith("positional")]
    names = re.findall(r"^  (\w+)", "\n".join(places), re.MULTILINE)
    usage = " ".join(["usage: fl-lightning", command, *names, "--config CONFIG [--SETTING VALUE ...]"])
    return "\n\n".join([usage, texts[1], *places, COMMON.format(command=command), texts[-1]])


def setting_names(*classes: str) -> set[str]:
    """Returns the names of the settings of some classes; without an argument, of all."""
    known = index()["classes"]
    return {name for kind in classes or known for name in known[kind]["settings"]}


def keys_of(setting: str) -> list[str]:
    """Returns the keys of the settings of this name in a config, the short ones first."""
    keys = {f"{kind['key']}.{setting}" for kind in index()["classes"].values() if setting in kind["settings"]}
    return sorted(
        (key for key in keys if re.match(r"(model|data|trainer)\.[\w.]+$", key)),
        key=lambda key: (len(key.split(".")), key),
    )


def fitting_classes(path: str, bases: Collection[str]) -> list[str]:
    """Returns the public classes that a setting takes.

    Args:
        path: The setting's key.
        bases: Their base classes. Of their subclasses, those with this key fit; if none has it, or there are no base
            classes, all of them or all with this key.
    """
    classes = index()["classes"]
    with_key = [name for name, kind in classes.items() if kind["key"].partition(":")[0] == path]
    # a base without settings, such as Ascent, or an abstract one is not among its members
    roots = [name for name, kind in classes.items() if not kind["settings"] or "abstract" in kind]
    members = {name: {*([] if name in roots else [name]), *kind["bases"]} for name, kind in classes.items()}
    subclasses = [name for name in members if {*bases} & members[name]]
    return [name for name in subclasses if name in with_key] or subclasses or with_key


def named_classes(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of the classes of a config by their key, and among them the texts of other settings."""
    return {key: text.rpartition(".")[2] for key, text in flatten(config).items()}


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
MOST = 300
"""Maximum number of letters of the parser's own words in a message."""


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
    inside, key = above[:1] in (["model"], ["data"], ["trainer"]), ".".join([*above, leaf])
    near = [] if above else similar(leaf, PARTS, cutoff=0.8)
    near = near or meant(key)
    kinds = [k for k in fitting_classes(".".join(above), ()) if leaf in setting_names(k)] if above[1:] else []
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    top = "" if inside or (near and not above) else "; settings stand under model, data and trainer"
    first = 1 + (above[:1] == ["trainer"])  # the trainer is no choice of classes
    chain = [f"--{'.'.join(above[:n])}.help=CLASS" for n in range(first, len(above) + 1) if inside]
    shown = f"`fl-lightning fit {' '.join(chain) or '--help=all'}` shows them"
    owner = " of this class" if not hint and key in keys_of(leaf) else ""
    if kinds:
        owner, hint = " of this class", f" (one of {', '.join(kinds[:3])}, which --{'.'.join(above)} names before it)"
    return f"{key}{f' = {value}' if value else ''}: no such setting{owner}{hint}{top}; {shown}"


def unknown_of(command: str, name: str, value: str) -> str | None:
    """Returns the message for an option that a subcommand does not have; None where a setting of a run may be meant."""
    options = [option for option in entry(command)["options"] if "." not in option and option not in ("help", *PARTS)]
    near = similar(name, options)
    if entry(command)["complete"] and (not near or meant(name)):
        return None
    listed = f"; choose from {', '.join(f'--{option}' for option in options)}" if options else ""
    hint = f" (did you mean --{near[0]}?)" if near else listed
    return f"{name}{f' = {value}' if value else ''}: no such option{hint}; see `fl-lightning {command} --help`"


def meant(wrong_key: str) -> list[str]:
    """Returns the keys of the settings that a wrong key may mean: those of its name, or of names like it.

    Of several keys, those count that stand nearest to where the wrong one stands.

    Args:
        wrong_key: A key that no setting of the chosen classes has.
    """
    above, _, leaf = wrong_key.replace("-", "_").casefold().rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)
    keys = [leaf] if "." in leaf else keys_of(leaf)
    if not keys and len(leaf) > 2:  # keys beside it count if they contain the word
        beside = (key for name in setting_names() if leaf in name for key in keys_of(name))
        keys = sorted(key for key in beside if above and key.rpartition(".")[0] == above)
    if slip := not keys:
        keys = [key for name in similar(leaf, sorted(setting_names()), cutoff=0.66) for key in keys_of(name)]
    keys = [key for key in keys if key != wrong_key and not any(key.startswith(f"{short}.") for short in keys)]
    stem = above.split(".")
    near = {key: max(n for n in range(len(stem) + 1) if key.split(".")[:n] == stem[:n]) for key in keys}
    nearest = [key for key in keys if near[key] == max(near.values())]
    return nearest[:1] if slip else nearest


def unknown_class(path: str, name: str, wanted: str) -> str:
    """Returns the message for a class that does not exist or does not fit; none for one that does.

    Args:
        path: The key of the setting.
        name: The class.
        wanted: The parser's own words about the classes that fit.
    """
    bases = set(re.findall(r"fl_lightning(?:\.\w+)*\.([A-Z]\w*)", first_of("Subtypes: (.*)", wanted)))
    known = fitting_classes(path, bases) or options_of("fit").get(path, {}).get("choices", [])
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
    if name in index()["classes"]:  # else its settings are wrong
        return f"{path} = {name}: not taken here; choose from {', '.join(known)}" if name not in known else ""
    near = similar(name, known)
    choice = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known or sorted(bases))}."
    remedy = FOREIGN.get(path, "A class of your own goes by its dotted path")
    if path == "model.optimizer" and "TorchOptimizer" not in known:  # as in FedAdamW, which takes AdamW or below it
        return f"{path} = {name}: no such class; {choice.strip('.')}"
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
    classes = [attribute for attribute in dir(imported) if attribute[:1].isupper()]
    hint = f"; it has {', '.join(similar(wanted, classes) or classes[:5])}" if classes else ""
    return f"module '{module}' has no attribute '{wanted}'{hint}"


def given_value(message: str, position: int = -1) -> Any:
    """Returns one of the values that the parser shows, the last of which is the outermost; None if it shows none."""
    try:
        return ast.literal_eval(re.findall(r"Given value: (.*)", message)[position])
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
