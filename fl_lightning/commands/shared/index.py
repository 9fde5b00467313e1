"""The index of the command line: what its answers need of the code, so that they import neither torch nor Lightning.

``index.json`` is made from the code by ``make renew``, and a test compares the two.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core import require

FILE = Path(__file__).with_name("index.json")

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
        its ``choices``, ``list`` if it is one, argparse's ``nargs``, and its ``type``, as Python writes it, if that has
        numbers, truth values, choices and null alone.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def entry(command: str) -> dict[str, Any]:
    """Returns the entry of a subcommand, as `index` has it.

    Raises:
        UserError: If it is newer than the index.
    """
    found: dict[str, Any] = index()["commands"].get(command, {})
    require(bool(found), "subcommand", command, "newer than index.json; run `make renew`")
    return found


def options_of(command: str) -> dict[str, Any]:
    """Returns the options of a subcommand by name, as `index` has them, those of the trainer among them."""
    own = entry(command)["options"]
    trainer = index()["classes"]["FederatedTrainer"]["settings"] if "trainer" in own else {}
    return {**own, **{f"trainer.{name}": setting for name, setting in trainer.items()}}


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
    found = {f"{kind['key']}.{setting}" for kind in index()["classes"].values() if setting in kind["settings"]}
    return sorted(
        (key for key in found if re.match(r"(model|data|trainer)\.[\w.]+$", key)),
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
    own = [name for name, kind in classes.items() if kind["key"].partition(":")[0] == path]
    # a base without settings, such as Ascent, and an abstract one are none of its members
    roots = [name for name, kind in classes.items() if not kind["settings"] or "abstract" in kind]
    members = {name: {*([] if name in roots else [name]), *kind["bases"]} for name, kind in classes.items()}
    below = [name for name in members if {*bases} & members[name]]
    return [name for name in below if name in own] or below or own


def named_classes(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Returns the names of the classes of a config, or of the ``init_args`` at a key, by their key."""
    found = {}
    for name, value in config.items():
        key, inner = f"{above}{name}", value if isinstance(value, Mapping) else {"class_path": value}
        if isinstance(path := inner.get("class_path"), str):
            found[key] = path.rpartition(".")[2]
        settings = inner.get("init_args", value if name == "trainer" else None)
        found |= named_classes(settings, f"{key}.") if isinstance(settings, Mapping) else {}
    return found
