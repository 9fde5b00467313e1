"""What leaves a private run, noised or not: the table of docs/privacy.md, made from the code.

A metric is private if it is the same in two runs whose releases are equal and whose clients, data and cohorts differ.
``make renew`` writes it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import fl_lightning as fl
from fl_lightning import AdaptivePrivacy, FedAvg, FederatedTrainer, UserError, algorithms
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.algorithms.parts.local_optimizer import LocalOptimizer
from fl_lightning.flower.node import CONTEXT
from fl_lightning.results.metrics import is_protected, read_metrics
from fl_lightning.trainer.aggregation.base import Plan
from tests.runs import cli, run

TABLE = re.compile(r"(?<=<!-- what leaves -->\n).*?(?=<!-- /what leaves -->)", re.DOTALL)
HEADS = ("of", "protected: noised, or a function of noised sums and public data", "not private")
Row = tuple[str, str, str]


def listed(names: Any, sign: str = "`") -> str:
    return ", ".join(f"{sign}{name}{sign}" for name in names)


# Algorithms and parts


def state(**options: Any) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Names of what an algorithm uploads, and of what its server and its clients keep; refused: an error."""
    make = options.pop("make", FedAvg)
    objective = make(options.pop("net", nn.Linear(4, 4)), weighting="uniform", **options)
    AdaptivePrivacy(noise_multiplier=1.0, delta=0.01).bind(Plan(objective, fl.UniformSampler(2), 20, 10, 3))
    return objective.wire[1], sorted(objective.server_inits()), sorted(objective.client_inits())


def of_algorithms() -> Iterator[Row]:
    """Algorithms that publish the same stand in one row; those that are refused in the last one."""
    groups: dict[Any, list[str]] = {}
    for name in sorted(algorithms.__all__, key=str.lower):
        try:
            up, server, clients = state(make=getattr(algorithms, name))
            key = listed(up) + (f"; of the server {listed(server)}" if server else ""), listed(clients) or "-"
        except UserError:
            key = "-", "refused"
        groups.setdefault(key, []).append(name)
    for (noised, exact), names in sorted(groups.items(), key=lambda item: item[0][1] == "refused"):
        yield listed(names, ""), noised, exact if exact in "-refused" else f"of the clients {exact}"


PARTS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {"optimizer": kind(state="keep")} for kind in (fl.AdamW, fl.Lion, fl.Muon)},
    "SGD": {"optimizer": fl.SGD(momentum=0.9, state="keep")},
    "TorchOptimizer": {"optimizer": fl.TorchOptimizer("Adam")},
    **{kind.__name__: {"ascent": kind()} for kind in (fl.SAM, fl.ASAM, fl.LESAM)},
    **{kind.__name__: {"server_update": kind()} for kind in
       (fl.ServerUpdate, fl.ServerMomentum, fl.ServerAdam, fl.ServerAdagrad, fl.ServerYogi)},
    **{kind.__name__: {"averaging": kind()} for kind in (fl.SWA, fl.EMA, fl.LastTwo)},
    "Compress": {"parts": [fl.Compress()]},
    "Personal": {"parts": [fl.Personal(["bias"])]},
    "Ditto": {"parts": [fl.Ditto()]},
    "MAN": {"parts": [fl.MAN()], "net": nn.Sequential(nn.Linear(4, 4), nn.ReLU())},
    "FlexLoRA": {"parts": [fl.FlexLoRA()], "net": fl.LoRA(nn.Sequential(nn.Linear(4, 4)), ["0"], rank=2)},
    "`relaxed_init`": {"relaxed_init": 0.1},
    **{f"`buffers: {policy}`": {"buffers": policy, "net": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))}
       for policy in ("average", "local", "reset")},
}  # fmt: skip


def of_parts() -> Iterator[Row]:
    """What each part adds; optimizers keep their state."""
    plain, groups = state(), dict[Any, list[str]]()
    for name, options in PARTS.items():
        try:
            new = [[n for n in after if n not in before] for after, before in zip(state(**options), plain, strict=True)]
            noised, clients = listed(dict.fromkeys([*new[0], *new[1]])), listed(new[2])
            key = noised or "-", f"of the clients {clients}" if clients else "-"
        except UserError:
            key = "-", "refused"
        groups.setdefault(key, []).append(name)
    for (noised, exact), names in groups.items():
        yield listed(names, ""), noised, exact


def test_every_part_is_in_the_table() -> None:
    kinds = {name for name in fl.__all__ if isinstance(getattr(fl, name), type)}
    parts = {name for name in kinds if issubclass(getattr(fl, name), Part | LocalOptimizer)}
    assert parts - {*PARTS} == {"Part", "Ascent", "Averaging", "LocalOptimizer"}


# Metrics


def everything(root: Path, number: int) -> Path:
    """The folder of a private run that measures whatever it can; only its clients, data and cohorts have the number."""
    rng, sizes = np.random.default_rng(number), [12, 15, 18, 21, 24, 27]
    clients = [(rng.normal(number, 1, (n, 4)), rng.integers(0, 3, n)) for n in (sizes if number else sizes[::-1])]
    test = (np.random.default_rng(9).normal(size=(20, 4)), np.arange(20) % 3)
    measures = [fl.LambdaMax(samples=20, iterations=2), fl.Discrepancy(samples=20), fl.Updates(),
                fl.ClientEvaluation(local_models=True), fl.CohortLoss()]  # fmt: skip
    faults = fl.Faults(0.2, 0.2, stragglers=fl.Stragglers(5.0, "lost"), corrupt=fl.Corrupt(0.5, "nan", each_round=True))
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=8, local_steps=6, sampler=fl.BernoulliSampler(0.6), accelerator="cpu", engine="sequential",
        clock=fl.Clock(sec_per_sample=0.1), faults=faults, on_divergence="continue",
        privacy=AdaptivePrivacy(noise_multiplier=1.0, delta=0.1, noise_seed=1),
        callbacks=[fl.FlatnessMonitor(1, measures)], enable_progress_bar=False, default_root_dir=str(root),
    )  # fmt: skip
    data = fl.Arrays(client_arrays=clients, test=test, batch_size=5, val_fraction=0.25)
    data.test_clients = np.arange(20) % 6

    def noise_alone(self: AdaptivePrivacy, received: Any) -> Any:
        clip = self.bound_of(received.server)
        sums = {name: (torch.zeros_like(v, dtype=torch.float64), self.noise_std(clip))
                for name, v in received.known.items()}  # fmt: skip
        return sums | {"privacy_below": (torch.zeros(1, dtype=torch.float64), self.count_std)}

    with (
        mock.patch.object(AdaptivePrivacy, "sums", noise_alone),
        mock.patch.object(AdaptivePrivacy, "cohort_seed", return_value=number),
    ):
        return trainer.fit(fl.SCAFFOLD(nn.Linear(4, 3), weighting="uniform"), data).folder.path


def of_metrics(root: Path) -> Iterator[Row]:
    columns = [read_metrics(everything(root, number) / "metrics.csv") for number in (0, 1)]
    assert columns[0].keys() == columns[1].keys()
    same = {name: columns[0][name] == columns[1][name] and not name.startswith("time/") for name in columns[0]}
    groups: dict[str, set[bool]] = {}
    for name, equal in same.items():
        groups.setdefault(group(name), set()).add(equal)
    private = sorted(name for name, flags in groups.items() if flags == {True})
    assert all(is_protected(name) == (group(name) in private) for name in same)
    yield "metrics", listed(private), listed(sorted(groups.keys() - {*private}))


def group(name: str) -> str:
    """Metrics of one measurement are private if all of them are."""
    first, *rest = name.split("/")
    return name if first in ("client", "comm", "privacy") and len(rest) == 1 else "/".join([first, *rest[:-1], "..."])


def test_private_runs_leave_no_more(tmp_path: Path) -> None:
    options = ("privacy=GaussianPrivacy", "privacy.delta=0.1", "privacy.noise_multiplier=1")
    folder = run("fit", "--model.weighting=uniform", *(f"--trainer.{option}" for option in options), root=tmp_path)
    add = ("study", "add", str(folder), f"--into={tmp_path / 'rows'}")
    report = ("report", str(folder), f"--out={tmp_path / 'page'}")
    for command in (
        add,
        report,
        ("export", str(folder / "checkpoints/last.ckpt"), str(tmp_path / "net.pt"), "--client=0"),
        ("export", str(folder), str(tmp_path / "net.pt"), "--client=0"),
    ):
        with pytest.raises(SystemExit, match=r"error: [^\n]*under trainer.privacy"):
            cli(*command)
    assert not any((tmp_path / name).exists() for name in ("net.pt", "rows", "page"))


# Files and messages


def of_others() -> Iterator[Row]:
    about = [name for name in CONTEXT if name not in ("t", "rounds", "phase", "lr")]
    yield "all files of the run folder", "-", "whatever they hold"
    yield "`fl-lightning export`", "weights and buffers", "-"
    yield "messages to Flower's nodes", "what the server sends", f"to the node of a client: `seed`, {listed(about)}"
    yield "W&B, loggers of Lightning", "settings, the protected metrics", "-"
    yield "`study add`, `report`, `export --client`", "-", "refused"
    yield "printed lines", "-", "progress, clients that were refused"


def table() -> str:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        rows = [HEADS, ("---",) * 3, *of_algorithms(), *of_parts(), *of_metrics(Path(folder)), *of_others()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill(page: str) -> str:
    """The page with the table."""
    text = table()
    return TABLE.sub(lambda _: text, page)
