"""The papers' runs on CIFAR-10, with flatness: 10,000 rounds each, which go on where they stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from fl_lightning.results.metrics import read_metrics
from legs.items import Item, accelerator

ROUNDS = 10_000
ROWS = {
    "FedAvg": "",
    "FedSAM": "--model FedSAM --model.rho 0.1",
    "FedGloSS+SAM": "--model FedGloSS --model.rho 0.15 --model.beta 10 --model.ascent SAM --model.ascent.rho 0.15"
    " --model.ascent.warmup 2000",
    "FedSMOO": "--model FedSMOO --model.rho 0.1 --model.beta 10",
    "FedGMT": "--model FedGMT --model.beta 10",
    "FedGF": "--model FedGF",
}
"""Settings of docs/experiments.md, table of FedGloSS; FedGMT and FedGF, which it lacks, with their defaults."""
SMALL = (
    "--model FedAvg --model.net DigitsMLP --data Digits --data.num_clients 6 --trainer.clients_per_round 3"
    " --trainer.max_rounds 40 --trainer.eval_every 20 --trainer.engine sequential"
)
FOLDER = Path("runs/gpu")


def items(device: str, end: float, fit: list[str]) -> dict[str, Item]:
    """The runs, in order of value."""
    if device == "cpu":
        return {"FedAvg": partial(train, "FedAvg", 40, SMALL.split(), device, end, fit)}
    found = {}
    for seed, alpha in ((0, "0.05"), (0, "0"), (1, "0.05"), (2, "0.05")):
        for name, row in ROWS.items():
            label = f"{name}, alpha {alpha}, seed {seed}"
            config = ["--config", f"experiment/fedgloss/cifar10_alpha{alpha}", "--trainer.seed", str(seed)]
            found[label] = partial(train, label, ROUNDS, [*config, *row.split()], device, end, fit)
    return found


def train(name: str, rounds: int, row: list[str], device: str, end: float, fit: list[str]) -> dict[str, Any]:
    """Trains until the run or the time ends."""
    folder = FOLDER / device / name.replace(", ", "-").replace(" ", "_")
    seconds = max(10, int(end - time.monotonic()) - 30)  # for evaluation and the checkpoint
    # the whole list, since one that is appended to joins the list of the run that is continued
    flatness = json.dumps([{"class_path": "FlatnessMonitor", "init_args": {"every_n_rounds": rounds // 2}}])
    command = [
        sys.executable, "-m", "fl_lightning", "fit", *row, "--trainer.callbacks", flatness, *fit,
        "--trainer.accelerator", accelerator(device), "--trainer.default_root_dir", str(folder.parent),
        "--trainer.name", folder.name, "--trainer.enable_progress_bar", "false",
    ]  # fmt: skip
    if last := newest(folder):
        from fl_lightning.trainer.storage import checkpoint  # here, since most of the time to start would be its import

        seconds += int(checkpoint.load(last)["elapsed"])  # the clock of a resumed run goes on
        command += ["--ckpt_path", str(last)]
    command += ["--trainer.max_time", f"{seconds // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    print(done.stderr, file=sys.stderr)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    columns = read_metrics(newest(folder).parents[1] / "metrics.csv")
    accuracy = columns.get("server/test/acc", [])
    last100 = [value for _, value in accuracy][-100:]
    reached = max(at for at, _ in columns["time/round_s"])
    return {
        "whole": reached >= rounds,
        "rounds": reached,
        **({"accuracy": mean(last100), "deviation": pstdev(last100)} if last100 else {}),
        "seconds a round": mean(value for _, value in columns["time/round_s"]),
        **{key: values[-1][1] for key, values in columns.items() if key.startswith("flatness/")},
        "curve": accuracy,
    }


def newest(folder: Path) -> Path | None:
    """The last checkpoint of a run; a start that ended before its first one leaves an empty version."""
    found = folder.glob("version_*/checkpoints/last.ckpt")
    return max(found, key=lambda path: int(path.parts[-3].removeprefix("version_")), default=None)
