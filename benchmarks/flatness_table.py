"""The measures of FedGF's Table 2 (LPF, lambda_max, discrepancy) on the digits: six algorithms, two heterogeneities.

``python benchmarks/flatness_table.py`` trains the problem of configs/quickstart.yaml with each algorithm's defaults (a
few minutes on two cores), writes docs/flatness_table.csv and the table of docs/measuring.md. Nothing is tuned.
"""

from __future__ import annotations

import csv
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import fl_lightning as fl
from fl_lightning.core.rng import generator
from fl_lightning.results.metrics import last_measurements

DOCS = Path(__file__).resolve().parents[1] / "docs"
CSV, PAGE = DOCS / "flatness_table.csv", DOCS / "measuring.md"
ALGORITHMS = ("FedAvg", "FedSAM", "FedASAM", "MoFedSAM", "FedSMOO", "FedGF")
ALPHAS = (0.05, 100.0)
"""Total concentrations of the Dirichlet split."""
MEASURES = {"lpf": "error", "lambda_max": "residual", "discrepancy": None}


def train(name: str, alpha: float) -> dict[str, Any]:
    """One run, as a row of the file: all measures on all training data, after the last round."""
    torch.manual_seed(generator(0, "initial weights").initial_seed())  # as the command line does
    model = getattr(fl, name)(net=fl.DigitsMLP(), optimizer=fl.SGD(lr=0.1, weight_decay=4e-4))
    data = fl.Digits(num_clients=50, batch_size=16, partition=fl.Dirichlet(alpha=alpha))
    metrics = [fl.LPF(samples=None), fl.LambdaMax(samples=None), fl.Discrepancy(samples=None)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = fl.FederatedTrainer(
            max_rounds=200, clients_per_round=10, eval_every=200, threads=1, accelerator="cpu", engine="sequential",
            seed=0, callbacks=[fl.FlatnessMonitor(200, metrics)], default_root_dir=folder,
            enable_progress_bar=False,
        )  # fmt: skip
        run = trainer.fit(model, data)
        found = last_measurements(run.folder.path)
    row: dict[str, Any] = {"algorithm": name, "alpha": alpha, "accuracy": f"{run.metrics['server/test/acc']:.4f}"}
    for measure, spread in MEASURES.items():
        row[measure] = f"{found[measure]['value']:.4g}"
        if spread:
            row[f"{measure}_{spread}"] = f"{found[measure][spread]:.1e}"
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, both heterogeneities side by side."""
    heads = [f"{title}, α = {alpha:g}" for alpha in ALPHAS for title in ("accuracy", "LPF", "λ_max", "Δ_F")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    found = {(row["algorithm"], row["alpha"]): row for row in rows}
    for name in ALGORITHMS:
        cells = [found[name, alpha][c] for alpha in ALPHAS for c in ("accuracy", "lpf", "lambda_max", "discrepancy")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for alpha in ALPHAS:
        for name in ALGORITHMS:
            rows.append(train(name, alpha))
            print(*rows[-1].values(), flush=True)
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"(<!-- table -->\n).*?(<!-- /table -->)", rf"\g<1>{table(rows)}\g<2>", text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
