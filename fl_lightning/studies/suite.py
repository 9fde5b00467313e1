"""The rules of a suite, as the ``about.yaml`` of a store says them: which rows are comparable, and when they decide."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml

from fl_lightning.core import UserError, folded
from fl_lightning.results import load_yaml
from fl_lightning.results.compare import Group
from fl_lightning.results.rows import ABOUT

FROZEN = ("suite", "fit", "draws", "tuning", "tuning_seeds", "rows", "columns", "seeds")
"""What ``about.yaml`` says of data, partitions, budgets and measures: another text of these is another suite."""
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
        try:
            return cls(**about_of(store).get("suite", {}))
        except TypeError as error:
            raise UserError(f"{store / ABOUT}: suite: {error}; give {', '.join(cls.__dataclass_fields__)}") from None

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
        UserError: If it is not readable.
    """
    path = store / ABOUT
    try:
        return dict(load_yaml(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not readable ({folded(error)}); give a YAML file, as in ledger/digits") from None


def frozen(about: Mapping[str, Any]) -> str:
    """Returns a hash of the rules, with the suite's name; each row that a study trains keeps it."""
    text = json.dumps({key: about[key] for key in FROZEN if key in about}, sort_keys=True)
    return f"{about.get('suite', {}).get('name', 'none')}, {sha256(text.encode()).hexdigest()[:8]}"
