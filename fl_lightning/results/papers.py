"""The numbers that the five papers print: ``papers.csv`` in this folder."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, ensure, read_json, similar
from fl_lightning.results.metrics import average, deviation, last_measurements, read_run, rounds_done
from fl_lightning.results.summary import SUMMARY, headline, summarise

PAPERS = {
    "fedsam": "Caldarola et al., ECCV 2022: FedSAM, FedASAM, SWA",
    "fedsmoo": "Sun et al., ICML 2023: FedSMOO; table FL-Simulator is that of its code's README",
    "fedgf": "Lee and Yoon, ICML 2024: FedGF",
    "fedgloss": "Caldarola et al., CVPR 2025: FedGloSS; table 5/10: rounds and costs of both",
    "fedgmt": "Li et al., ICML 2025: FedGMT; table FL-SAM is that of its code's README",
}

EVALUATED = {
    "acc": "server/test/acc",
    "miou": "server/test/miou",
    "miou_seen": "server/test_seen/miou",
    "miou_unseen": "server/test_unseen/miou",
}
"""Metrics that a run evaluates, which the papers print in per cent; ``acc@5000`` and ``acc@50%`` are of one round."""
TARGETS = {
    "rounds": "target_round",
    "rounds_to_fedavg": "target_round",
    "cost": "target_bits",
    "transmissions_100": "target_transmissions",
}
"""Numbers up to the first evaluation that is as good as a target, by their names in a `Summary`."""
COUNTED = {("fedsmoo", "FedCM", "cost"): 4 / 3, ("fedsmoo", "MoFedSAM", "cost"): 4 / 3}
"""Factors of our number where a paper counts more than travels: FedSMOO's Table 3 has FedCM's Delta up as well."""
_ALL_CLIENTS = "{class_path: ClientLambdaMax, init_args: {data: [local, global], clients: all}}"
MEASURED = {
    "lambda_max": ("lambda_max", "LambdaMax"),
    "lambda_ratio": ("lambda_ratio", "{class_path: Spectrum, init_args: {method: power}}"),
    "trace": ("trace", "HessianTrace"),
    "lpf": ("lpf_filter", "{class_path: LPF, init_args: {scale: filter}}"),
    "discrepancy": ("discrepancy_all", "{class_path: Discrepancy, init_args: {clients: all, samples: null}}"),
    "divergence": ("divergence_next", "Updates"),
    "lambda_local": ("client_lambda_max_local_all", _ALL_CLIENTS),
    "lambda_global": ("client_lambda_max_global_all", _ALL_CLIENTS),
}
"""Measures that are taken at the end of a run: the name that is logged, and the measure as a config gives it."""
CLASSES = {
    "airplane": "0", "bird": "2", "cat": "3", "frog": "6",
    "bear": "3", "possum": "64", "sea": "71", "skyscraper": "76", "snail": "77",
}  # fmt: skip
"""Numbers of the classes, of CIFAR-10 and of CIFAR-100, that FedGloSS's Table 1 names."""


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        paper: A key of `PAPERS`.
        table: Its number there.
        dataset: A data set of the package, or CIFAR100-PAM.
        model: The package's network that stands for the paper's.
        heterogeneity: As the paper prints it, so FedGF's alpha is that of a class.
        participation: Clients of a round / all clients.
        epochs: Local epochs E.
        algorithm: Algorithm and its additions, such as ``FedASAM+SWA``.
        metric: What the number is: ``acc`` in percent, ``acc@5000`` after 5,000 rounds, ``acc@50%`` after half of them;
            ``miou``, also of ``seen`` and ``unseen`` domains; ``lambda_max``, ``lambda_ratio`` (lambda_1 / lambda_5),
            ``trace``, ``lpf``, ``discrepancy``, ``divergence``; ``lambda_local@cat`` and ``lambda_global@cat`` of a
            local model whose client has images of cats alone; ``rounds@74`` (rounds to 74 %), likewise ``seconds@74``,
            ``minutes@41``, and ``cost@74`` (communication over FedAvg's up to the same accuracy); to FedAvg's final
            accuracy: ``rounds_to_fedavg``, ``cost`` (communication over that of all of FedAvg's rounds), and
            ``transmissions_100`` (hundreds of models); ``models_per_client`` (down and up), also ``_down`` and ``_up``
            alone; ``seconds_per_round``; ``communication_per_round`` and ``computation_per_step``, over FedAvg's.
        value: The number; None if there is none, and `note` says why.
        std: Its standard deviation, if known.
        note: Doubts; begins with "lost" (in the text at hand), "uncertain", "not converged", "not reached" or
            "failed" where that is so.
        printed: Number and standard deviation with the digits of the paper.
    """

    paper: str
    table: str
    dataset: str
    model: str
    heterogeneity: str
    participation: str
    epochs: str
    algorithm: str
    metric: str
    value: float | None
    std: float | None
    note: str
    printed: str

    @property
    def quantity(self) -> str:
        """What the number is, without the round or target at which it is taken."""
        return self.metric.partition("@")[0]


COLUMNS = tuple(field.name for field in fields(Cell) if field.name not in ("value", "std", "note", "printed"))


def find(**where: str) -> list[Cell]:
    """Returns the cells with these values, such as ``find(paper="fedsam", table="2", dataset="CIFAR10")``.

    Args:
        where: Values by column, one of `COLUMNS`; case does not matter.

    Returns:
        At least one cell, in the order of the papers' tables.

    Raises:
        UserError: If a column is unknown, or no cell has these values.
    """
    cells = list(_all())
    for column, value in where.items():
        ensure(
            column in COLUMNS,
            f"papers: {column} is no column; choose from {', '.join(COLUMNS)}",
        )
        values = sorted({getattr(cell, column) for cell in cells})
        cells = [cell for cell in cells if getattr(cell, column).casefold() == value.casefold()]
        if not cells:
            choice = ", ".join(filter(None, dict.fromkeys([*similar(value, values), *values])))
            raise UserError(f"{column} = {value}: not in the papers' tables; choose from {choice}")
    return cells


def our_number(run: Path, metric: str, fraction: float = 1.0) -> float | None:
    """Returns the headline of a run for a paper's metric, in the paper's unit; None if the run did not measure it.

    Args:
        run: The run folder.
        metric: The metric of a `Cell`.
        fraction: The fraction of the paper's rounds that the run has.
    """
    name, _, at = metric.partition("@")
    if name in TARGETS:
        return _to_target(run, name, at)
    if name in MEASURED:
        logged = MEASURED[name][0]
        return _of_client(run, logged, at) if at else headline(run, f"flatness/{logged}")
    if name not in EVALUATED:
        return None
    due = rounds_done(read_run(run)) * float(at[:-1]) / 100 if at.endswith("%") else float(at or 0) * fraction
    number = headline(run, EVALUATED[name], at=due if at else None)
    return None if number is None else 100 * number


def beside_fedavg(metric: str) -> bool:
    """Returns whether a number needs FedAvg's runs: its final accuracy is the target, or its communication the unit."""
    return metric.partition("@")[0] in TARGETS and not metric.startswith("rounds@")


def _to_target(run: Path, name: str, at: str) -> float | None:
    """Returns a number up to a target accuracy in per cent, or up to FedAvg's; infinity if it is never reached."""
    # the runs of a column are in one folder, see `fl_lightning.sweeps.reproduction.Task`
    fedavg = [path.parent for path in sorted((run / "../../../FedAvg").glob(f"seed_*/version_*/{SUMMARY}"))]
    target = float(at) / 100 if at else average([summarise(folder).mean for folder in fedavg])
    if math.isnan(target):
        return None
    number = getattr(summarise(run, target=target), TARGETS[name])
    summaries = [summarise(folder, target=target) for folder in fedavg]
    bits = [(summary.target_bits if at else summary.bits) or math.nan for summary in summaries]
    return math.inf if number is None else number / {"cost": average(bits), "transmissions_100": 100}.get(name, 1)


def _of_client(run: Path, name: str, images: str) -> float | None:
    """Returns a measure of the first client that has images of one class alone; ``airplane2`` is of the second."""
    clients, measured = clients_of(run, images.rstrip("2")), last_measurements(run).get(name)
    index = images.endswith("2")
    return measured["details"]["clients"].get(str(clients[index])) if measured and len(clients) > index else None


def clients_of(run: Path, images: str) -> list[int]:
    """Returns the clients of a run that have images of one of `CLASSES` alone."""
    counts = read_json(run / "partition.json", dict[str, Any], {}).get("counts", ())
    return [client for client, classes in enumerate(counts) if [*classes] == [CLASSES[images]]]


@dataclass(frozen=True)
class Line:
    """Our runs beside a cell of a paper.

    Attributes:
        cell: The paper's number.
        values: Our number of each run in which it is finite, in the paper's unit.
        folders: The run folders; none if the number is declared by the algorithm, and needs no run.
        errors: Why runs do not count.
        fraction: The fraction of the paper's rounds that the runs have.
        settings: Settings of the runs that are not the paper's, as on the command line.
    """

    cell: Cell
    values: tuple[float, ...]
    folders: tuple[Path, ...] = ()
    errors: tuple[str, ...] = ()
    fraction: float = 1.0
    settings: str = ""

    @property
    def mean(self) -> float | None:
        """Mean over the runs."""
        return average(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the runs."""
        return deviation(self.values)

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's."""
        return None if self.mean is None or self.cell.value is None else self.mean - self.cell.value


def beside(
    cell: Cell, runs: Sequence[Path], fraction: float = 1.0, errors: Sequence[str] = (), settings: str = ""
) -> Line:
    """Returns our runs beside a cell of a paper.

    Args:
        cell: The cell.
        runs: Folders of finished runs.
        fraction: The fraction of the paper's rounds that they have.
        errors: Why other runs broke off.
        settings: Settings of the runs that are not the paper's.
    """
    numbers = {run: our_number(run, cell.metric, fraction) for run in runs}
    factor = COUNTED.get((cell.paper, cell.algorithm, cell.quantity), 1.0)
    finite = {run: factor * x for run, x in numbers.items() if x is not None and math.isfinite(x)}
    words = {None: "not measured"} | ({math.inf: "not reached"} if cell.quantity in TARGETS else {})
    left_out = [f"{run}: {cell.metric} is {words.get(x, x)}" for run, x in numbers.items() if run not in finite]
    return Line(cell, tuple(finite.values()), tuple(runs), (*errors, *left_out), fraction, settings)


@cache
def _all() -> tuple[Cell, ...]:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            Cell(
                **{name: row[name] for name in (*COLUMNS, "note")},
                value=float(row["value"]) if row["value"] else None,
                std=float(row["std"]) if row["std"] else None,
                printed=" ± ".join(filter(None, (row["value"], row["std"]))),
            )
            for row in csv.DictReader(file)
        )
