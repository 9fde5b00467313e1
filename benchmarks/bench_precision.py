"""Does bf16-mixed reach the accuracy of float32? Paired seeds: same weights, cohorts and minibatches.

    python benchmarks/bench_precision.py --data cifar10.npz --split cifar10_federated_train_alpha_100.00.json --jobs 2

FedAvg in the setting of FedSAM's paper (HsuCNN, 5 of 100 clients, 1 epoch of batch 64, lr 0.01, weight decay 4e-4). The
accuracy of a run is the mean of the evaluations of its last 100 rounds. The file ``--out`` is written after each run.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev

PRECISIONS = ("32-true", "bf16-mixed")


def accuracy(data: str, split: str, rounds: int, precision: str, seed: int) -> float:
    """Mean test accuracy over the last 100 rounds, evaluated every 20."""
    import torch

    import fl_lightning as fl
    from fl_lightning.trainer.run import Run

    torch.manual_seed(seed)
    found: list[float] = []

    class Evaluations(fl.Callback):
        def on_round_logged(self, run: Run, metrics: dict[str, float]) -> None:
            if "server/test/acc" in metrics and run.rounds_done > rounds - 100:
                found.append(metrics["server/test/acc"])

    arrays = fl.Arrays(
        data, num_clients=100, partition=fl.FromFile(split), batch_size=64, augment=fl.Augment(crop=4, flip=True),
    )  # fmt: skip
    model = fl.FedAvg(net=fl.HsuCNN(), optimizer=fl.SGD(lr=0.01, weight_decay=4e-4))
    with tempfile.TemporaryDirectory() as folder:
        fl.FederatedTrainer(
            max_rounds=rounds, clients_per_round=5, eval_every=20, accelerator="cpu", threads=1, precision=precision,
            engine="sequential", seed=seed, callbacks=[Evaluations()], default_root_dir=folder,
            enable_progress_bar=False,
        ).fit(model, arrays)  # fmt: skip
    return mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", required=True)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3, help="2 or more")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path, default=Path("precision.csv"))
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = {
            (seed, precision): pool.submit(accuracy, args.data, args.split, args.rounds, precision, seed)
            for seed in range(args.seeds)
            for precision in PRECISIONS
        }
        rows = []
        for (seed, precision), future in futures.items():
            rows.append((seed, precision, f"{future.result():.4f}"))
            print(*rows[-1], flush=True)
            with args.out.open("w", newline="") as file:
                csv.writer(file).writerows([("seed", "precision", "accuracy"), *rows])
    differences = [
        futures[seed, "bf16-mixed"].result() - futures[seed, "32-true"].result() for seed in range(args.seeds)
    ]
    error = stdev(differences) / math.sqrt(len(differences))
    print(f"bf16-mixed minus 32-true: {mean(differences):+.4f}, standard error {error:.4f}")


if __name__ == "__main__":
    main()
