"""The registry of metrics: the title, unit and direction of each name."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from fl_lightning.core import read_json, require

Mode = Literal["max", "min"]
"""Whether the largest or the smallest value of a metric is the best."""
DIRECTIONS = "directions.json"
"""File of a run folder with the directions of metrics, where they do not follow from the names."""


class Known(NamedTuple):
    """A metric that the package logs.

    Attributes:
        name: Its name; ``{}`` stands for what the data evaluate, such as acc.
        title: Its title in tables and figures.
        unit: Its unit; empty if it has the unit of what the data evaluate.
        key: Key of its column in ``compare.csv``; empty if it has no column of its own.
    """

    name: str
    title: str
    unit: str = ""
    key: str = ""


OWN = "server/clients"
"""Section with means over clients, of the global model or of their own ones."""
EVALUATED = {"acc": ("accuracy", "fraction"), "miou": ("mIoU", "fraction"), "loss": ("loss", "loss")}
"""Title and unit of what data evaluate, by the last part of the metric's name."""
METRICS = (
    Known("server/test/{}", "test {}"),
    Known("server/val/{}", "validation {}"),
    Known("client/train/{}", "training {}"),
    Known("flatness/lambda_max", "lambda_max", "loss / weight²", "lambda_max"),
    Known("flatness/discrepancy", "discrepancy", "loss", "discrepancy"),
    Known("flatness/sharpness_global", "global sharpness", "loss", "sharpness_global"),
    Known("flatness/sharpness_local", "local sharpness", "loss", "sharpness_local"),
    Known("server/clients/{}", "mean of clients", key="clients"),
    Known("server/clients/{}_weighted", "mean weighted by samples", key="clients_weighted"),
    Known("server/clients/{}_std", "sd over clients", key="clients_std"),
    Known("server/clients/{}_worst_decile", "worst 10 % of clients", key="worst_decile"),
    Known("server/clients/{}_worst", "worst client", key="worst_client"),
    Known("server/unseen_clients/{}", "mean of clients not seen", key="unseen_clients"),
    Known("client/adapted/{}", "mean of clients not seen, adapted", key="adapted_clients"),
    Known("client/test/{}", "local models", key="local"),
    Known("client/test/{}_worst_decile", "worst 10 % of local models", key="local_worst_decile"),
    Known("client/test/{}_gap", "local minus global", key="local_gap"),
)
MAIN = (
    "server/test/acc",
    "server/test/miou",
    "server/test/loss",
    "client/train/loss",
    "server/clients/acc_worst_decile",
    "flatness/lambda_max",
    "flatness/discrepancy",
)
"""Metrics that a run shows while it trains and in its figure, if it measures them."""


def known(metric: str) -> Known:
    """Returns the entry of a metric; one that is not in the registry has its own name as title."""
    _, _, leaf = metric.rpartition("/")
    for entry in METRICS:
        match = re.fullmatch(re.escape(entry.name).replace(r"\{\}", "([a-z0-9]+)"), metric)
        if match:
            evaluated, unit = EVALUATED.get(match[1], (match[1], "")) if match.groups() else ("", entry.unit)
            return Known(metric, entry.title.format(evaluated), unit, entry.key)
    return Known(metric, leaf.replace("_", " ") if metric.startswith("flatness/") else metric, key=leaf)


def title(metric: str) -> str:
    """Returns the title of a metric."""
    return known(metric).title


def label(metric: str) -> str:
    """Returns the title of a metric as matplotlib typesets it."""
    return title(metric).replace("lambda_max", r"Hessian $\lambda_{max}$")


def shown(metrics: Iterable[str]) -> list[str]:
    """Returns the metrics that a run shows: those of `MAIN`, and what else is evaluated on the test set; see `tested`.

    Args:
        metrics: Names of the metrics that were measured.
    """
    names = dict.fromkeys(metrics)
    further = [name for name in tested(names) if name not in MAIN]
    return [name for name in MAIN if name in names] + further


def tested(metrics: Iterable[str]) -> list[str]:
    """Returns what is evaluated on the test set, but the loss: of the global model, or of clients' own models."""
    names = dict.fromkeys(metrics)
    found = [name for name in names if name.startswith("server/test/")]
    found = found or [name for name in names if re.fullmatch(f"{OWN}/[a-z0-9]+", name)]
    return [name for name in found if not name.endswith("/loss")]


def mode_of(metric: str, mode: Mode | None = None, directions: Mapping[str, Mode] | None = None) -> Mode:
    """Returns whether large or small values of a metric are good.

    Large values of what the data evaluate (``server/...``, ``client/test/...``: accuracy, mIoU) are good, unless the
    metric itself declares otherwise. Small losses, deviations over clients, flatness, times and bits are good.

    Args:
        metric: Name of the metric.
        mode: The user's choice; None: as the name says.
        directions: What the run's metrics declare themselves, by the last part of their names; see `read_directions`.

    Raises:
        UserError: If the name does not tell.
    """
    require(mode in ("max", "min", None), "mode", mode, "choose from max, min")
    if mode is not None:
        return mode
    leaf, declared = metric.rpartition("/")[2], directions or {}
    if found := declared.get(leaf) or declared.get(re.sub("_(weighted|worst|worst_decile)$", "", leaf)):
        return found
    if re.search(r"(^|/)loss$|_std$", metric) or metric.startswith(("flatness/", "time/", "comm/")):
        return "min"
    evaluated = metric.startswith(("server/", "client/test/"))
    require(evaluated, "metric", metric, "set mode to max or min: its name does not tell")
    return "max"


def read_directions(folder: Path) -> dict[str, Mode]:
    """Returns the directions of a run's metrics that their names do not tell, from its ``directions.json``, if any.

    Raises:
        UserError: If the file is damaged.
    """
    found: dict[str, Mode] = read_json(folder / DIRECTIONS, dict[str, Mode], {})
    return found


def is_flatness(metric: str) -> bool:
    """Returns whether a metric is a measure of flatness; residuals and standard errors are not."""
    return metric.startswith("flatness/") and not metric.endswith(("_residual", "_error"))


def is_of_clients(metric: str) -> bool:
    """Returns whether a metric is a statistic over the evaluations of each client."""
    return metric.startswith(("server/clients/", "client/test/"))


def is_result(metric: str) -> bool:
    """Returns whether a metric is a result, with a best value and a curve: evaluation, training loss and flatness."""
    return is_flatness(metric) or metric.startswith("server/") or metric == "client/train/loss"
