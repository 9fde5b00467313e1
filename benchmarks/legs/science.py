"""Six methods on CIFAR-10, side by side: the runs of ledger/cifar10 on a GPU. What the time cuts off is kept.

The arguments after ``--`` name the data. Runs lie in ``runs`` beside the file of results, and go on where they
stopped. On a CPU, small runs of the digits, which take none of those arguments, show that all of this works.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

from benchmarks.legs.items import Item, Task, accelerator, is_failure, machine, machine_name
from fl_lightning.results.metrics import read_run, rounds_done

ROUNDS, EVAL_LAST, SEED = 3000, 100, 0
"""Those of the ledger."""
COMMON = (
    f"--config experiment/fedsam/cifar10_alpha0.05 --trainer.max_rounds {ROUNDS} --trainer.eval_every 20"
    f" --trainer.eval_last {EVAL_LAST} --trainer.precision bf16-mixed --trainer.threads 1 --trainer.seed {SEED}"
)
"""The config has clients, cohort, epoch, batches, SGD (lr 0.01, weight decay 4e-4), augmentation, mean and std."""
ROWS = {
    "FedAvg": "",
    # docs/experiments.md, rows of fedsam: scripts of the repositories of FedSAM and FedGF
    "FedSAM": "--model FedSAM --model.rho 0.1",
    # the class's defaults (gamma 1, tau 3, ema_alpha 0.95, beta 10): no table of its paper has this split
    "FedGMT": "--model FedGMT",
    # the released script (rho 0.15, beta 10, SAM clients, warmup of 2,000 rounds), but the dual of the paper
    "FedGloSS+SAM": "--config presets/fedgloss_repo/cifar10 --model.sigma_scale paper",
    # the class's defaults: rho 0.1 and beta 10 as in its paper's Table 5, without that table's lr_decay of 0.9995
    "FedSMOO": "--model FedSMOO",
    # docs/experiments.md, rows of fedsam: rho and eta for this split from scripts of the repositories of FedSAM and
    # FedGF; compositions/swa (start at 75 %, cycles of 10 rounds from lr 0.01 to 1e-4) from that of FedSAM, not
    # shortened with the rounds. The paper's appendix with its own values was not available
    "FedASAM+SWA": "--model FedASAM --model.rho 0.7 --model.eta 0.2 --config compositions/swa",
}
"""What a row sets in addition."""
ALGORITHMS = {"FedAvg", "FedSAM", "FedGMT", "FedGloSS", "FedSMOO", "FedASAM"}
ENGINES = ("sequential", "batched", "graphed")
SMALL = (
    "--model FedAvg --model.net DigitsMLP --data Digits --data.num_clients 6 --trainer.clients_per_round 3"
    " --trainer.eval_every 5 --trainer.eval_last 10 --trainer.engine sequential"
)
SMALL_ROWS = {"FedAvg": (40, ""), "FedGMT": (40, "--model FedGMT"), "FedAvg, long": (1500, "")}
"""Rounds and settings; the long one takes about a minute, so that the end of the leg can cut it off."""
SAVING = 20.0
"""Seconds that a run has to save itself when the leg has ended."""
ACCURACY = "server/test/acc"
Columns = Mapping[str, Sequence[tuple[int, float]]]


class Job(NamedTuple):
    """A run: its rounds, of which the last ones are all evaluated, and its settings as arguments of fit."""

    name: str
    rounds: int
    eval_last: int
    fit: list[str]


def items(task: Task) -> dict[str, Item]:
    """Returns the runs, in order of value."""
    if task.device == "cpu":
        jobs = [
            Job(name, rounds, 10, [*f"{SMALL} {row} --trainer.max_rounds {rounds}".split(), *callbacks(20)])
            for name, (rounds, row) in SMALL_ROWS.items()
        ]
    else:
        jobs = [Job(name, ROUNDS, EVAL_LAST, [*settings(name), *task.fit]) for name in ROWS]
    return {job.name: partial(train, job, task) for job in jobs}


def settings(name: str) -> list[str]:
    """Returns all settings of one of the six runs but data and engine."""
    return [*COMMON.split(), *ROWS[name].split(), *callbacks(500)]


def callbacks(every: int) -> list[str]:
    """Returns checkpoints and flatness; the whole list, since one that is appended to joins that of a continued run."""
    flatness = {"every_n_rounds": every, "metrics": ["LambdaMax", "Updates"]}
    both = [("Checkpoints", {"every_n_rounds": every}), ("FlatnessMonitor", flatness)]
    return ["--trainer.callbacks", json.dumps([{"class_path": name, "init_args": args} for name, args in both])]


def train(job: Job, task: Task) -> dict[str, Any]:
    """Trains until the run or the time ends, and returns what it has logged in either case.

    It ends by a signal at ``task.end``, however late it has begun; ``max_time`` counts from the making of the run.
    """
    folder = task.out.absolute().parent / "runs" / job.name.replace(", ", "-")
    engine = [] if task.device == "cpu" else ["--trainer.engine", engine_for(task.out, task.device)]
    command = [
        sys.executable, "-m", "fl_lightning", "fit", *job.fit, *engine,
        "--trainer.accelerator", accelerator(task.device), "--trainer.default_root_dir", str(folder.parent),
        "--trainer.name", folder.name, "--trainer.enable_progress_bar", "false",
    ]  # fmt: skip
    if last := newest(folder):
        command += ["--ckpt_path", str(last)]
    code, errors = until(command, task.end)
    columns = max(map(read_run, folder.glob("version_*")), key=rounds_done, default={})
    outcome = {**summary(columns, job.rounds, job.eval_last), **({"engine": engine[1]} if engine else {})}
    if code:
        lines = [line for line in errors.splitlines() if line.strip()]
        outcome |= {"error": lines[-1] if lines else f"exit code {code}", "whole": False}
    return outcome


def until(command: list[str], end: float) -> tuple[int, str]:
    """Runs a program, which is asked to end at ``end``, and killed if it does not.

    Returns:
        Its exit code, 0 if it was ended; and its errors.
    """
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    cut = False
    try:
        _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        cut = True
        process.terminate()  # it saves its last whole round
        try:
            _, errors = process.communicate(timeout=SAVING)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
    print(errors, file=sys.stderr)
    return 0 if cut else process.returncode, errors


def summary(columns: Columns, rounds: int, eval_last: int) -> dict[str, Any]:
    """Returns what a run's metrics say: its accuracy, or that of the last evaluations by another name if it is cut off.

    Args:
        columns: The metrics by round.
        rounds: All rounds of the run.
        eval_last: How many of the last rounds are evaluated, and count.
    """
    reached, evaluations = rounds_done(columns), list(columns.get(ACCURACY, []))
    last = [value for t, value in evaluations if t > rounds - eval_last]
    outcome: dict[str, Any] = {"whole": reached >= rounds, "rounds": reached}
    if len(last) == eval_last:
        outcome |= {"accuracy": mean(last), "deviation": pstdev(last)}
    elif evaluations:
        latest = evaluations[-5:]
        outcome["accuracy_of_last_evaluations"] = mean(value for _, value in latest)
        outcome["rounds_of_last_evaluations"] = [t for t, _ in latest]
    if seconds := columns.get("time/round_s"):
        outcome["seconds a round"] = mean(value for _, value in seconds)
    for name, values in columns.items():
        if name.startswith("flatness/"):
            outcome |= {name: values[-1][1], "flatness_round": values[-1][0]}
    return {**outcome, "curve": evaluations}


def newest(folder: Path) -> Path | None:
    """Returns the last checkpoint of a run; a start that ended before its first one leaves an empty version."""
    checkpoints = folder.glob("version_*/checkpoints/last.ckpt")
    return max(checkpoints, key=lambda path: int(path.parts[-3].removeprefix("version_")), default=None)


def engine_for(out: Path, device: str) -> str:
    """Returns the engine with the fastest round of W1 here, auto if none was timed; graphed only if it was right."""
    content = json.loads(out.read_text()) if out.exists() else {}
    results = content.get(machine_name(machine(device)), {})
    wrong = any(is_failure(value) for name, value in results.get("correctness", {}).items() if is_graphed(name))
    setting = {"work": "W1", "method": "FedAvg", "form": "bf16", "seeds": 1, "cohort": 5}
    seconds = {
        v["who"]: v["round_s"]
        for v in results.get("speed", {}).values()
        if v.get("who") in ENGINES and "round_s" in v and setting.items() <= v.items()
    }
    if wrong:
        seconds.pop("graphed", None)
    return min(seconds, key=lambda who: seconds[who], default="auto")


def is_graphed(check: str) -> bool:
    """Whether an item of the correctness leg is one of the six algorithms with the engine graphed."""
    algorithm, _, engine = check.rpartition(", ")
    return engine == "graphed" and algorithm in ALGORITHMS
