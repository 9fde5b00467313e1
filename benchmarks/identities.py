"""How far server states are from the identities that their papers give them, under faults and rules; in float64.

``python benchmarks/identities.py`` trains (four minutes on one core) and prints a table in Markdown.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from fl_lightning import (
    SCAFFOLD,
    SGD,
    Callback,
    CoordinateMedian,
    Corrupt,
    Digits,
    DigitsMLP,
    Dirichlet,
    Faults,
    FedDyn,
    FederatedTrainer,
    FedGloSS,
    FedSMOO,
    GaussianPrivacy,
    Krum,
    LocalObjective,
    MultiKrum,
    NormClipping,
    Stragglers,
    TrimmedMean,
)
from fl_lightning.core import RoundContext, State, to_radius
from fl_lightning.core.rng import generator
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.run import Run

ROUNDS, CLIENTS, SEED = 30, 50, 0
METHODS: dict[type[LocalObjective], str] = {SCAFFOLD: "c", FedDyn: "lam", FedSMOO: "lam", FedGloSS: "lam"}
COLUMNS = ["SCAFFOLD: c", "FedDyn: λ", "FedSMOO: λ", "FedSMOO: s", "FedGloSS: λ"]
LATE, NAN = Stragglers(3.8, "lost"), Corrupt(0.2)
FLIPS = Faults(corrupt=Corrupt(0.2, "sign_flip", 4.0))
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("mean", "none"): {},
    ("mean", "30 % dropout, half of it after training"): {"faults": Faults(0.15, 0.176)},
    ("mean", "late uploads are lost"): {"faults": Faults(stragglers=LATE)},
    ("mean", "late uploads count in part"): {"faults": Faults(stragglers=Stragglers(3.8))},
    ("mean", "20 % of the clients send NaN"): {"faults": Faults(corrupt=NAN)},
    ("mean", "dropout, lost late uploads and NaN"): {"faults": Faults(0.15, 0.176, stragglers=LATE, corrupt=NAN)},
    ("mean", "20 % flip signs, factor 4"): {"faults": FLIPS},
    ("`NormClipping(1e6)`, which shortens nothing", "none"): {"aggregation": NormClipping(1e6)},
    **{
        (f"`{name}`", kind): {"aggregation": rule, **({"faults": FLIPS} if kind != "none" else {})}
        for name, rule in {
            "NormClipping": NormClipping(),
            "TrimmedMean(0.2)": TrimmedMean(0.2),
            "CoordinateMedian": CoordinateMedian(),
            "MultiKrum(0.2)": MultiKrum(0.2),
            "Krum(0.2)": Krum(0.2),
        }.items()
        for kind in ("none", "20 % flip signs, factor 4")
    },
    ("`GaussianPrivacy(1, 1)`", "none"): {"privacy": GaussianPrivacy(1.0, 1.0, delta=0.01, noise_seed=0)},
}


class Identities(Callback):
    """Measures after every round how far the server's state is from what its clients' states give.

    Attributes:
        found: ``|server's - clients'| / |clients'|`` after each round, by state.
    """

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.found: dict[str, list[float]] = {}
        self._cohort: list[LocalResult] = []

    def on_round_start(self, run: Run, ctx: RoundContext, clients: list[int]) -> None:
        self._cohort = []

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        self._cohort.append(result)

    def on_round_end(self, run: Run) -> None:
        rows = run.clients.rows()  # clients never seen have zeros
        self._compare(self.slot, run.server[self.slot], _sum([row[self.slot] for row in rows.values()]) / CLIENTS)
        if isinstance(run.objective, FedSMOO):
            counted = [result for result in self._cohort if _kept(result, rows)]
            if counted:  # the direction of the cohort's mean of mu_i - s_hat_i, of length rho
                mean = _sum([result.upload["s"] for result in counted]) / len(counted)
                self._compare("s", run.server.s, to_radius(mean, run.objective.rho))

    def _compare(self, name: str, server: Tensor, clients: Tensor) -> None:
        self.found.setdefault(name, []).append(float((server - clients).norm() / clients.norm()))


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def _kept(result: LocalResult, rows: dict[int, State]) -> bool:
    """Whether the server accepted a client's upload: only then its state is stored."""
    return result.client in rows and torch.equal(rows[result.client].mu, result.state.mu)


def violations(method: type[LocalObjective], options: dict[str, Any]) -> list[list[float]]:
    """Relative violation of each identity of a method after each round of a run."""
    torch.manual_seed(generator(SEED, "initial weights").initial_seed())
    measured = Identities(METHODS[method])
    with tempfile.TemporaryDirectory() as root:
        FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=10, eval_every=ROUNDS, seed=SEED, precision="64-true", threads=1,
            engine="batched", accelerator="cpu", callbacks=[measured], loggers=[], default_root_dir=root,
            enable_progress_bar=False, **options,
        ).fit(
            method(net=DigitsMLP(), optimizer=SGD(0.1), weighting="uniform"),
            Digits(num_clients=CLIENTS, partition=Dirichlet(1.0), batch_size=16),
        )  # fmt: skip
    return list(measured.found.values())


def cell(found: list[float]) -> str:
    """The largest violation; beside it the last one, unless all are rounding."""
    return f"{max(found):.0e}" if max(found) < 1e-10 else f"{max(found):.2g}, {found[-1]:.2g}"


def main() -> None:
    """Prints a row for each rule and kind of fault."""
    print(f"| rule | faults | {' | '.join(COLUMNS)} |\n|---|---|{'--:|' * len(COLUMNS)}")
    for (rule, faults), options in CASES.items():
        cells = [cell(found) for method in METHODS for found in violations(method, options)]
        print(f"| {rule} | {faults} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
