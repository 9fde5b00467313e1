"""Small runs on this CPU as ``fl-lightning plan`` predicts them, and as measured.

The plan is made, then the run, in processes of their own, one after the other. Prints a table in Markdown: seconds from
the first round to the end, peak memory of the first process, bits on the wire.

    python benchmarks/bench_plan.py --only SCAFFOLD
    python benchmarks/bench_plan.py --cpu    # seconds of CPU time, on a busy machine; of single processes
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from fl_lightning import Callback
from fl_lightning.commands.shared.prediction import peak_memory

HERE = Path(__file__).resolve().parent
COMMON = "--data=Digits --data.batch_size=16 --trainer.accelerator=cpu --trainer.threads=1"
QUICKSTART = f"--config={HERE.parent / 'configs' / 'quickstart.yaml'} --trainer.loggers=null --trainer.accelerator=cpu"
MONITOR = "--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.every_n_rounds=10"
RUNS = {
    "quickstart, graphed": (1, f"{QUICKSTART} --trainer.engine=graphed"),
    "SCAFFOLD, CNN, sequential": (
        1,
        f"--model=SCAFFOLD --model.net=DigitsCNN {COMMON} --data.num_clients=20 --data.partition=Dirichlet "
        "--data.partition.alpha=0.5 --trainer.engine=sequential --trainer.max_rounds=40",
    ),
    "FedAvg, MLP, batched": (
        1,
        f"--model=FedAvg --model.net=DigitsMLP {COMMON} --trainer.engine=batched --trainer.max_rounds=300 "
        f"--trainer.eval_every=5 --data.val_fraction=0.1 {MONITOR}",
    ),
    "quickstart, sequential, 2 processes": (2, f"{QUICKSTART} --trainer.engine=sequential --trainer.max_rounds=150"),
}
"""Processes and arguments, by name."""
UNITS = (("seconds", "s", 1.0), ("memory", "MB", 1e6), ("bits", "Mbit", 1e6))


class Clock(Callback):
    """Writes what a run took to a file when its first process ends.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_fit_start(self, run: Any) -> None:
        if run.fabric.is_global_zero:
            self.started = time.perf_counter()
            atexit.register(self.write, run)

    def write(self, trainer: Any) -> None:
        found = {
            "seconds": time.perf_counter() - self.started,
            "memory": peak_memory(),
            "bits": trainer.metrics["comm/total_bits"],
        }
        self.path.write_text(json.dumps(found))


def command(*args: str, cpu: bool) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    clock = "import time; time.perf_counter = time.process_time; "
    program = (
        ["-c", f"{clock}from fl_lightning.commands.main import main; main()"] if cpu else [str(HERE.parent / "cli.py")]
    )
    call = [sys.executable, *program, *args]  # Fabric starts further processes from a file
    return subprocess.run(call, cwd=HERE, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare(world: int, args: list[str], cpu: bool) -> tuple[dict[str, float], dict[str, float]]:
    """What is planned, and what is measured."""
    root = Path(tempfile.mkdtemp())
    try:
        planned = json.loads(command("plan", *args, f"--devices={world}", "--json=true", cpu=cpu))
        many = [f"--trainer.devices={world}", "--trainer.strategy=ddp"] if world > 1 else []
        clock = ["--trainer.callbacks+=bench_plan.Clock", f"--trainer.callbacks.path={root / 'clock.json'}"]
        command("fit", *args, *many, *clock, f"--trainer.default_root_dir={root}", cpu=cpu)
        return planned, json.loads((root / "clock.json").read_text())
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Part of the name of the runs to make.")
    parser.add_argument(
        "--turns", type=int, default=3, help="How often each is planned and run, in turns; the medians count."
    )
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, and only of runs of one process.")
    asked = parser.parse_args()
    print("| run | | planned | measured | planned / measured | each turn |\n|---|---|---|---|---|---|")
    for name, (world, args) in RUNS.items():
        wanted = asked.only in name and not (asked.cpu and world > 1)
        turns = [compare(world, args.split(), asked.cpu) for _ in range(asked.turns if wanted else 0)]
        for key, unit, size in UNITS:
            pairs = [(planned[key] / size, measured[key] / size) for planned, measured in turns if measured[key]]
            if pairs:
                a, b = (median(column) for column in zip(*pairs, strict=True))
                each = ", ".join(f"{planned / measured:.2f}" for planned, measured in pairs)
                print(f"| {name} | {key} | {a:.4g} {unit} | {b:.4g} {unit} | {a / b:.2f} | {each} |", flush=True)
    print(f"\nload of the machine in the last 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
