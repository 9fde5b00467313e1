"""The rules of a suite, as the ``about.yaml`` of a store says them: which rows are comparable, and when they decide."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml

from fl_lightning.core import Interval, UserError, check_values, ensure, fits, folded, require
from fl_lightning.results import ABOUT, Group, load_yaml

FROZEN = ("suite", "fit", "draws", "tuning", "tuning_seeds", "rows", "columns", "seeds")
"""What ``about.yaml`` says of data, partitions, budgets and measures: another text of these is another suite."""


def _is_arguments(value: Any) -> bool:
    """Returns whether a text can be split into arguments as a shell does."""
    try:
        return isinstance(value, str) and shlex.split(value) is not None
    except ValueError:
        return False


ARGUMENTS = (_is_arguments, "arguments of fit as one text, with its quotes closed")
FORMS: Mapping[str, tuple[Any, str]] = {
    "title?": (str, "text"),
    "text?": (str, "text"),
    "reference?": (str, "a method"),
    "verified?": (list[str], "a list of methods"),
    "runner_up?": (list[str], "a list of methods"),
    "suite?": (dict[str, Any], "its rules by name"),
    "fit?": ARGUMENTS,
    "draws?": (Annotated[int, Interval("[2, inf)")], "a whole number of at least 2"),
    "tuning?": ARGUMENTS,
    "tuning_seeds?": (list[int], "a list of whole numbers"),
    "rows?": ARGUMENTS,
    "columns?": (lambda v: fits(v, dict[str, Any]) and all(map(_is_arguments, v.values())), "arguments by column"),
    "seeds?": (list[int], "a list of whole numbers"),
    "ranges?": (
        lambda v: fits(v, dict[str, Any]) and all(fits(entry, {"key": str}) for entry in v.values()),
        "for each range its key, and min and max or values",
    ),
    "methods?": (
        lambda v: fits(v, dict[str, list[str]]) and all(method and _is_arguments(method[0]) for method in v.values()),
        "for each method a list: its arguments, and the names of its ranges",
    ),
}
"""The forms of the keys of ``about.yaml``, and what to give; see `written`."""
RUNNER_UP = " (runner-up)"
"""Ends the name of a method that is trained with its second-best settings."""


@dataclass(frozen=True)
class Suite:
    """The rules of a suite.

    Attributes:
        name: Its name, which ends with its version.
        kind: ``as published``: a column is one paper's common setting, with that paper's settings of each method;
            ``equal budget``: each method was tuned with as many draws. Methods are compared within a column only.
        source: Where the settings of a column are from, as published.
        seeds: Fewest seeds, of those that have not collapsed, with which a claim is seen, not seen or refuted.
        collapsed: A run whose headline is not above this value has collapsed, and enters no mean.
        alone: Whether a claim can be seen on this suite alone.
        measures: Metrics that each row has.
        targets: A value of the headline's metric by column, whose first round is compared.
    """

    name: str = "none"
    kind: Literal["as published", "equal budget"] = "as published"
    source: str = ""
    seeds: int = 5
    collapsed: float = float("-inf")
    alone: bool = True
    measures: Sequence[str] = ()
    targets: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Path) -> "Suite":
        """Returns the suite of a store; one without a file has the rules above.

        Raises:
            UserError: If its file is not readable, or has another key.
        """
        rules = about_of(store).get("suite", {})
        hints = get_type_hints(cls)
        for name in rules:
            require(name in hints, f"{store / ABOUT}: suite.{name}", rules[name], f"give {', '.join(hints)}")
        check_values(f"{store / ABOUT}: suite", rules, hints)
        return cls(**rules)

    def survivors(self, group: Group) -> tuple[Group, list[str]]:
        """Returns a group without the runs that have collapsed, and the seeds of these."""
        kept = [k for k, run in enumerate(group.runs) if run.mean > self.collapsed]  # NaN is not
        folders, seeds, runs = (
            [group.folders[k] for k in kept],
            [group.seeds[k] for k in kept],
            [group.runs[k] for k in kept],
        )
        lost = [str(seed[0] if seed else "none") for k, seed in enumerate(group.seeds) if k not in kept]
        return replace(group, folders=folders, seeds=seeds, runs=runs), lost


def about_of(store: Path) -> dict[str, Any]:
    """Returns what ``about.yaml`` of a store says; nothing without one.

    Raises:
        UserError: If it is not readable, or a key has another form.
    """
    return written(store / ABOUT, FORMS, "ledger/digits") if (store / ABOUT).is_file() else {}


def written(path: Path, forms: Mapping[str, tuple[Any, str]], like: str) -> dict[str, Any]:
    """Returns the content of a YAML file that people write.

    Args:
        path: The file.
        forms: By key, the form of its value (see `fl_lightning.core.options.fits`) and what to give; a key that ends
            in ``?`` may be missing, and other keys are free.
        like: An example of such a file.

    Raises:
        UserError: If it is not readable, or has not this form.
    """
    try:
        content = dict(load_yaml(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not readable ({folded(error)}); give a YAML file, as in {like}") from None
    for name, (form, remedy) in forms.items():
        key = name.removesuffix("?")
        shown = f"{key} = {content[key]!s:.60}" if key in content else f"{key}: missing"
        ensure(fits(content, {name: form}), f"{path}: {shown}; give {remedy}, as in {like}")
    return content


def frozen(about: Mapping[str, Any]) -> str:
    """Returns a hash of the rules, with the suite's name; each row that a study trains keeps it."""
    text = json.dumps({key: about[key] for key in FROZEN if key in about}, sort_keys=True)
    return f"{about.get('suite', {}).get('name', 'none')}, {sha256(text.encode()).hexdigest()[:8]}"
