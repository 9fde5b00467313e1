"""The index of the command line: what its answers need of the code, so that they import neither torch nor Lightning.

``index.json`` is made from the code by ``python -m tests.command_index``, and a test compares the two.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("index.json")


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


def options_of(command: str) -> dict[str, Any]:
    """Returns the options of a subcommand by name, as `index` has them, those of the trainer among them."""
    own = index()["commands"][command]["options"]
    trainer = index()["classes"]["FederatedTrainer"]["settings"] if "trainer" in own else {}
    return {**own, **{f"trainer.{name}": setting for name, setting in trainer.items()}}


def help_of(command: str) -> str:
    """Returns the help of a subcommand, 80 columns wide."""
    return "\n\n".join(index()["texts"][i] for i in index()["commands"][command]["help"])


def setting_names(*classes: str) -> set[str]:
    """Returns the names of the settings of some classes; without an argument, of all."""
    known = index()["classes"]
    return {name for kind in classes or known for name in known[kind]["settings"]}


def fitting_classes(path: str, bases: Collection[str]) -> list[str]:
    """Returns the public classes that a setting takes.

    Args:
        path: The setting's key.
        bases: Their base classes; without any, the classes with this key fit.
    """
    return [
        name
        for name, kind in index()["classes"].items()
        if ({*bases} & {*kind["bases"]} if bases else kind["key"] == path)
    ]


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
