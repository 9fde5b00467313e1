"""Every algorithm on the digits with clients that fail, next to a run without faults; nothing is tuned.

``python benchmarks/faults_table.py`` trains (three minutes on one core), and writes docs/faults.csv; names of
algorithms after it train these alone. 30 % of the uploads are lost; a deadline makes about
10 % late, which are lost, too; 5 % of the clients send NaN, or their update with its sign flipped and four times as
long.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import torch

from fl_lightning import (
    SGD,
    Aggregation,
    Corrupt,
    Digits,
    DigitsMLP,
    Dirichlet,
    Faults,
    FederatedTrainer,
    NormClipping,
    Stragglers,
    UserError,
    algorithms,
)
from fl_lightning.core.rng import generator

DOCS = Path(__file__).resolve().parents[1] / "docs"
CSV = DOCS / "faults.csv"
ROUNDS, SEED = 100, 0
NAN = Corrupt(0.05, "nan")
FLIP = Corrupt(0.05, "sign_flip", 4.0)
COLUMNS: dict[str, tuple[Corrupt | None, type[NormClipping] | None]] = {
    "no faults": (None, None),
    "NaN, mean": (NAN, None),
    "sign flips, NormClipping": (FLIP, NormClipping),
    "sign flips, mean": (FLIP, None),
}


def accuracy(name: str, corrupt: Corrupt | None, rule: type[Aggregation] | None) -> str:
    """Final test accuracy in per cent, or why there is none."""
    faults = corrupt and Faults(drop_after=0.3, stragglers=Stragglers(deadline=3.8, late="lost"), corrupt=corrupt)
    torch.manual_seed(generator(SEED, "initial weights").initial_seed())
    own = name in ("FedAdamW", "FedMuon", "LocalMuon")  # an optimizer
    model = getattr(algorithms, name)(net=DigitsMLP(), optimizer=None if own else SGD(0.1))
    with tempfile.TemporaryDirectory() as root:
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=10, eval_every=ROUNDS, faults=faults, seed=SEED,
            aggregation=rule() if rule else None, threads=1, engine="batched", accelerator="cpu", callbacks=[],
            loggers=[], default_root_dir=root, enable_progress_bar=False,
        )  # fmt: skip
        try:
            run = trainer.fit(model, Digits(num_clients=50, partition=Dirichlet(1.0), batch_size=16))
        except UserError as error:
            return "diverged" if "diverged" in str(error) else "refused"
    return f"{100 * run.metrics['server/test/acc']:.0f}"


def main() -> None:
    with CSV.open(newline="") as file:
        known = {row[0]: row for row in list(csv.reader(file))[1:]}
    for name in sys.argv[1:] or algorithms.__all__:
        known[name] = [name, *(accuracy(name, *how) for how in COLUMNS.values())]
        print(*known[name], flush=True)
    rows = [known[name] for name in sorted(known, key=str.lower)]
    with CSV.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["algorithm", *COLUMNS], *rows])


if __name__ == "__main__":
    main()
