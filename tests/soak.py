"""Kills runs by ``kill -9`` at random moments until each has ended, and compares it with one that was never killed.

First, one long run with faults shows that memory stays flat.

Run ``make soak``, or ``python -m tests.soak --forked 400 --real 40``. With 500 kills and no loss, a loss of more than
0.6 % of kills is refuted at 95 % (the rule of three, 3 / 500). Most kills hit forks of this process, which start in
milliseconds, so that they fall into rounds and saves rather than imports; the real ones show that forks differ in
nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import yaml

from fl_lightning import (
    SGD,
    Checkpoints,
    Corrupt,
    Digits,
    DigitsMLP,
    Dirichlet,
    Discrepancy,
    Faults,
    FederatedTrainer,
    FedSMOO,
    FlatnessMonitor,
    LambdaMax,
    Stragglers,
)
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.run import Run
from tests.runs import DIGITS, Child, assert_same, forked, group, kill, last, metrics, newest, process, rows, state

OPTIONS: dict[str, list[str]] = {
    "rows in the file, every checkpoint kept": [
        "--trainer.client_memory=0", "--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=3",
        "--trainer.callbacks.keep_all=true",
    ],
    "rows in memory and in the file, measurements": [
        "--trainer.client_memory=0.00001", "--trainer.callbacks+=FlatnessMonitor",
        "--trainer.callbacks.every_n_rounds=4",
        "--trainer.callbacks.metrics=[{class_path: LambdaMax, init_args: {samples: 50}}, Discrepancy]",
    ],
    "best checkpoints, average, odd cohorts": [
        "--model.averaging=EMA", "--trainer.sampler=BernoulliSampler", "--trainer.sampler.p=0.5",
        "--trainer.callbacks+=Checkpoints", "--trainer.callbacks.monitor=server/test/acc",
        "--trainer.callbacks.save_top_k=2", "--trainer.callbacks.every_n_rounds=2",
    ],
    "clients that are lost, late and broken": [
        "--trainer.client_memory=0.00001", "--trainer.on_divergence=continue", "--trainer.faults=Faults",
        "--trainer.faults.drop_before=0.1", "--trainer.faults.drop_after=0.2", "--trainer.faults.stragglers=Stragglers",
        "--trainer.faults.stragglers.deadline=4", "--trainer.faults.corrupt=Corrupt",
        "--trainer.faults.corrupt.share=0.1", "--trainer.callbacks+=Checkpoints",
        "--trainer.callbacks.every_n_rounds=3",
    ],
    "sign flips under a rule": [
        "--trainer.aggregation=NormClipping", "--trainer.faults=Faults", "--trainer.faults.corrupt=Corrupt",
        "--trainer.faults.corrupt.share=0.1", "--trainer.faults.corrupt.kind=sign_flip",
        "--trainer.faults.corrupt.each_round=true", "--trainer.callbacks+=Checkpoints",
        "--trainer.callbacks.every_n_rounds=1",
    ],
    "private clients that are lost and broken": [
        "--trainer.privacy=GaussianPrivacy", "--trainer.privacy.clip=1", "--trainer.privacy.noise_multiplier=1",
        "--trainer.privacy.noise_seed=1", "--trainer.sampler=BernoulliSampler", "--trainer.sampler.p=0.5",
        "--trainer.on_divergence=continue", "--trainer.faults=Faults", "--trainer.faults.drop_before=0.1",
        "--trainer.faults.corrupt=Corrupt", "--trainer.faults.corrupt.share=0.1", "--trainer.callbacks+=Checkpoints",
        "--trainer.callbacks.every_n_rounds=2",
    ],
}  # fmt: skip
"""Options of the runs, by name; new options of the trainer that keep state belong here."""
MODELS = ["SCAFFOLD", "FedSMOO", "FedDyn"]
ROUNDS = 20


@dataclass
class Soak:
    """Kills, and what they have cost.

    Attributes:
        folder: Where the runs lie.
        seed: Seed of the moments.
        kills: Kills by kind.
        runs: Runs that came to their end, by kind.
        losses: What differed from the unbroken run.
    """

    folder: Path
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.whole: dict[tuple[str, ...], tuple[Path, float]] = {}

    def kill(self, kind: str, kills: int) -> None:
        """Kills until so many have hit, run after run."""
        number = 0
        while self.kills[kind] < kills:
            name, model = list(OPTIONS)[number % len(OPTIONS)], MODELS[number // len(OPTIONS) % len(MODELS)]
            self._run(kind, name, model, self.folder / kind / str(number), kills)
            number += 1

    def _run(self, kind: str, name: str, model: str, root: Path, kills: int) -> None:
        args = [f"--model={model}", *DIGITS, f"--trainer.max_rounds={ROUNDS}", *OPTIONS[name]]
        unbroken, seconds = self._unbroken(kind, args)
        while True:
            ckpt = list(root.glob("*/*/checkpoints/last.ckpt"))
            options = [f"--trainer.default_root_dir={root}", *(["--ckpt_path=last"] if ckpt else [])]
            with ExitStack() as stack:
                children = self._start(stack, kind, [*args, *options])
                if self.kills[kind] < kills:
                    hit = self._strike(children, root, seconds)
                    self.kills[kind] += hit
                    if hit:
                        continue
                outputs = [child.communicate(timeout=300) for child in children]
                codes = [child.returncode for child in children]
            if any(codes):
                self.losses.append(f"{kind}, {name}, {model}: exit {codes}, {outputs}")
            break
        self.runs[kind] += 1
        try:
            ended = newest(root)
            assert last(ended)["round"] == ROUNDS
            assert_same(state(ended), state(unbroken))
            assert_same(rows(ended), rows(unbroken))
            assert metrics(ended) == metrics(unbroken)
            assert incidents(ended) == incidents(unbroken)
        except (AssertionError, ValueError, OSError) as error:
            self.losses.append(f"{kind}, {name}, {model}: {error!r:.300}")
        shutil.rmtree(root)

    def sweep(self, kills: int) -> None:
        """Kills workers of sweeps, and now and then the sweep itself, until so many have hit, sweep after sweep."""
        settings = OPTIONS["private clients that are lost and broken"]
        file = self.folder / "sweep.yaml"
        config = {
            "program": "fl-lightning", "method": "grid", "metric": {"name": "server/test/acc"},
            "parameters": {"model": {"values": MODELS}, "trainer.seed": {"values": [0, 1]}},
            "command": ["fl-lightning", "fit", *DIGITS, f"--trainer.max_rounds={10 * ROUNDS}", *settings, "${args}"],
        }  # fmt: skip
        file.write_text(yaml.safe_dump(config))
        unbroken, number = self._swept(file, self.folder / "whole sweep", 0), 0
        while self.kills["sweeps"] < kills:
            folders = self._swept(file, self.folder / f"sweeps {number}", kills)
            for name, folder in folders.items():
                try:
                    assert_same(state(folder), state(unbroken[name]))
                    assert metrics(folder) == metrics(unbroken[name])
                    assert incidents(folder) == incidents(unbroken[name])
                except (AssertionError, ValueError, OSError) as error:
                    self.losses.append(f"sweeps, {name}: {error!r:.300}")
            if folders.keys() != unbroken.keys():
                self.losses.append(f"sweeps: {folders.keys()} have ended, not {unbroken.keys()}")
            self.runs["sweeps"] += len(folders)
            number += 1

    def _swept(self, file: Path, root: Path, kills: int) -> dict[str, Path]:
        """Returns the run folder of each trial of a sweep by two workers, which is started until all have finished."""
        while True:
            with forked("sweep", str(file), "--jobs=2", f"--out={root}", cwd=self.folder) as child:
                while child.poll() is None and self.kills["sweeps"] < kills:
                    time.sleep(self.draw.uniform(0, 20))
                    victims = [*workers(child.pid), *workers(child.pid), child.pid]
                    with suppress(ProcessLookupError):
                        os.kill(self.draw.choice(victims), signal.SIGKILL)
                        self.kills["sweeps"] += 1
                output = child.communicate(timeout=600)
            if child.returncode == 0:
                break
            if child.returncode not in (-signal.SIGKILL, 1):  # 1: a trial's worker was killed too often
                self.losses.append(f"sweeps: exit {child.returncode}, {output}")
                break
        with (root / file.stem / "sweep.csv").open(newline="") as table:
            return {row["model"] + row["trainer.seed"]: Path(row["folder"]) for row in csv.DictReader(table)}

    def _unbroken(self, kind: str, args: list[str]) -> tuple[Path, float]:
        """Returns the run of the same kind that is not killed, and its seconds; sums by process differ in rounding."""
        key = ("two" if kind == "two processes" else "one", *args)
        if key not in self.whole:
            started, root = time.monotonic(), self.folder / "whole" / str(len(self.whole))
            with ExitStack() as stack:
                launcher = kind if kind == "two processes" else "forked"
                for child in self._start(stack, launcher, [*args, f"--trainer.default_root_dir={root}"]):
                    _, err = child.communicate(timeout=300)
                    assert child.returncode == 0, err
            self.whole[key] = newest(root), time.monotonic() - started
        return self.whole[key]

    def _start(self, stack: ExitStack, kind: str, args: list[str]) -> list[Child]:
        if kind == "real":
            command = [sys.executable, "-m", "fl_lightning", "fit", *args]
            return [stack.enter_context(process(*command, cwd=self.folder))]
        if kind == "two processes":
            args = [*args, "--trainer.devices=2", "--trainer.strategy=ddp"]
            return stack.enter_context(group(2, "fit", *args, cwd=self.folder))
        return [stack.enter_context(forked("fit", *args, cwd=self.folder))]

    def _strike(self, children: list[Child], root: Path, seconds: float) -> bool:
        """Kills at a random moment after the folder was locked; returns whether there was something left to kill."""
        pids = {f"{child.pid}" for child in children}
        while all(child.poll() is None for child in children):
            if any(lock.read_text().strip() in pids for lock in root.glob("*/*/run.lock")):
                break
            time.sleep(0.002)
        time.sleep(self.draw.uniform(0, 0.4 * seconds))  # a run that goes on takes less than the whole one
        for child in self.draw.sample(children, len(children)):
            kill(child)
        codes = [child.wait(60) for child in children]
        return -signal.SIGKILL in codes


class Memory(Callback):
    """Resident memory of this process in MiB, every tenth of the run."""

    def __init__(self) -> None:
        self.mib: list[float] = []

    def on_round_end(self, run: Run) -> None:
        if run.rounds_done % (run.max_rounds // 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mib.append(pages * resource.getpagesize() / 2**20)


def long_run(folder: Path, rounds: int) -> list[float]:
    """Returns memory in MiB, ten times in a run with faults, measurements and a checkpoint every ten rounds."""
    memory, corruption = Memory(), Corrupt(0.1, "nan")
    trainer = FederatedTrainer(
        max_rounds=rounds, clients_per_round=5, eval_every=10, threads=1, engine="graphed", enable_progress_bar=False,
        faults=Faults(drop_before=0.1, drop_after=0.2, stragglers=Stragglers(deadline=3.8), corrupt=corruption),
        on_divergence="continue", default_root_dir=folder,
        callbacks=[Checkpoints(), FlatnessMonitor(rounds // 10, [LambdaMax(samples=100), Discrepancy()]), memory],
    )  # fmt: skip
    with redirect_stderr(StringIO()):
        trainer.fit(FedSMOO(DigitsMLP(), optimizer=SGD(0.1)), Digits(num_clients=50, partition=Dirichlet(1.0)))
    return memory.mib


def workers(pid: int) -> list[int]:
    """Returns the processes that train for a sweep."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
    return pids


def incidents(folder: Path) -> str:
    """Returns the table of what befell the clients; empty without faults."""
    path = folder / "clients.csv"
    return path.read_text() if path.exists() else ""


def main() -> None:
    """Kills, prints the counts, and exits with 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    for kind, kills in (
        ("forked", 400),
        ("real", 40),
        ("two-processes", 10),
        ("sweeps", 50),
        ("rounds", 10000),
        ("seed", 0),
    ):
        parser.add_argument(f"--{kind}", type=int, default=kills)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), args.seed)
        if args.rounds:
            mib = long_run(Path(folder) / "long", args.rounds)
            print(f"{args.rounds} rounds: MiB after each tenth {', '.join(f'{size:.0f}' for size in mib)}", flush=True)
            if mib[-1] > 1.02 * mib[1]:
                soak.losses.append(f"memory grew from {mib[1]:.0f} to {mib[-1]:.0f} MiB")
        for kind, kills in (("forked", args.forked), ("real", args.real), ("two processes", args.two_processes)):
            soak.kill(kind, kills)
            print(f"{kind}: {soak.kills[kind]} kills, {soak.runs[kind]} runs ended", flush=True)
        soak.sweep(args.sweeps)
        print(f"sweeps: {soak.kills['sweeps']} kills, {soak.runs['sweeps']} runs ended", flush=True)
    for loss in soak.losses:
        print(f"LOST: {loss}")
    total = sum(soak.kills.values())
    print(f"{total} kills, {sum(soak.runs.values())} runs, {len(soak.losses)} losses", flush=True)
    sys.exit(bool(soak.losses))


if __name__ == "__main__":
    main()
