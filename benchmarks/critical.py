"""Critical sharpness against lambda_max on the digits: one run an algorithm, by its defaults; and what it costs.

``python benchmarks/critical.py`` trains (about ten minutes on one core) and prints the rank correlations over the
final models, and the share of a run that the measure takes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from scipy.stats import spearmanr

from fl_lightning import (
    SGD,
    CriticalSharpness,
    Digits,
    DigitsMLP,
    Dirichlet,
    FederatedTrainer,
    FlatnessMonitor,
    LambdaMax,
    algorithms,
)

NAMES = (
    "FedAvg", "FedProx", "FedAvgM", "SCAFFOLD", "FedCM", "FedDyn", "FedSAM", "FedASAM", "MoFedSAM", "FedGAMMA",
    "FedSMOO", "FedSpeed", "FedLESAM", "FedLESAMD", "FedGF", "FedGloSS", "FedGMT", "FedNSAM", "FedSWA", "FedMoSWA",
    "FedTOGA", "FedScar",
)  # fmt: skip
ROUNDS = 200


def run(name: str, every: int, metrics: list[Any]) -> dict[str, float]:
    """The metrics of the last round."""
    torch.manual_seed(0)
    model = getattr(algorithms, name)(net=DigitsMLP(), optimizer=SGD(lr=0.1, weight_decay=4e-4))
    data = Digits(num_clients=50, batch_size=16, partition=Dirichlet(alpha=0.05))
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=10, eval_every=ROUNDS, threads=1, accelerator="cpu",
            engine="sequential", callbacks=[FlatnessMonitor(every, metrics)], default_root_dir=folder,
            enable_progress_bar=False,
        )  # fmt: skip
        return dict(trainer.fit(model, data).metrics)


def main() -> None:
    rows = {name: run(name, ROUNDS, [LambdaMax(tol=1e-3), CriticalSharpness(clients=10)]) for name in NAMES}
    heads = ("lambda_max", *(f"critical_sharpness{end}" for end in ("", "_server", "_clients", "_own")))
    for name, row in rows.items():
        print(name, *(f"{row.get(f'flatness/{head}', float('nan')):.4g}" for head in heads), sep=" | ")
    for head in heads[1:]:
        pairs = [(row["flatness/lambda_max"], row.get(f"flatness/{head}", float("inf"))) for row in rows.values()]
        print(f"{head}: rank correlation with lambda_max {spearmanr(*zip(*pairs, strict=True)).statistic:.2f}")
    for along, every in ((["gradient"], 50), (["server"], 50), (["server", "clients"], 100), (None, 100)):
        share = run("FedSAM", every, [CriticalSharpness(along)])["time/flatness_share"]  # type: ignore[arg-type]
        print(f"along {along}, every {every} rounds: {100 * share:.1f} % of the run")


if __name__ == "__main__":
    main()
