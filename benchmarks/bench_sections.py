"""Where the time of a round goes: the seconds of its parts, without a profiler, which would change how memory is used.

    python benchmarks/bench_sections.py --work W2 --method FedSMOO
    python benchmarks/bench_sections.py --work W3-MLP --method FedAvg --engine graphed --compile

A part's time is that of its functions without the parts that these call. Reported are milliseconds of a round and
microseconds of a local step, in wall time; the rounds of bench_engine.py are a little shorter, as nothing is clocked.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import time
from collections import defaultdict
from typing import Any

import torch
from contest import ours
from contest.report import machine
from contest.workloads import METHODS, WORKS, Work
from contest.workloads import work as workload

import fl_lightning as fl
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import FlatNet
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import sequential
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.graphed import GraphedEngine
from fl_lightning.engine.record import Compiled
from fl_lightning.engine.sequential import SequentialEngine
from fl_lightning.trainer import loop
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.received import Arrivals
from fl_lightning.trainer.round import Phase, Round
from fl_lightning.trainer.run import Run

REST = "the rest"


class Sections:
    """Seconds by part; a part that begins within another one interrupts it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running, self._since = [REST], time.perf_counter()

    def charge(self) -> None:
        """Adds the time since the last call to the part that runs."""
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def clock(self, owner: Any, name: str, part: str) -> None:
        """Makes a function of a class or module count for a part."""
        raw = inspect.getattr_static(owner, name)
        function = raw.__func__ if isinstance(raw, classmethod) else raw

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self._running.pop()

        setattr(owner, name, classmethod(clocked) if isinstance(raw, classmethod) else clocked)


def clock_all(sections: Sections, objective: type[LocalObjective], record: type) -> None:
    """Clocks the functions of a round, and what a record is."""
    clock = sections.clock
    for owner in (Phase, Round, Run, Arrivals):
        for name in {"apply", "metrics", "aggregate", "__init__"} & vars(owner).keys():
            clock(owner, name, "aggregation, server's step, log")
    clock(loop, "close", "aggregation, server's step, log")
    clock(Cohort, "draw", "cohort")
    clock(Phase, "jobs", "clients' states, order of samples")
    clock(FederatedDataModule, "samples", "samples, augmented")
    clock(SequentialEngine, "_train", "engine")
    clock(BatchedEngine, "_train_rows", "engine")
    clock(BatchedEngine, "_results", "engine: results")
    clock(GraphedEngine, "_steps", "engine: inputs of the record")
    clock(record, "__call__", "the recorded steps")
    clock(sequential, "logits", "forward of the teacher")
    clock(LocalObjective, "training_step", "forward")
    clock(torch.autograd, "grad", "backward")
    clock(FlatNet, "gradient", "gradient as one vector")
    clock(FlatNet, "move_to", "weights as views")
    clock(objective, "local_step", "arithmetic on vectors")
    clock(fl.SGD, "step", "arithmetic on vectors")


class Turns:
    """Takes what the rounds cost, of which the first do not count."""

    def __init__(self, sections: Sections, warm: int, rounds: int) -> None:
        self.sections, self.warm, self.rounds, self.done = sections, warm, rounds, 0
        self.seconds: dict[str, float] = {}

    def ready(self, engine: str = "") -> None:
        """The run begins."""

    def round(self, seconds: float, **more: float) -> None:
        """A round is done."""
        self.sections.charge()
        self.done += 1
        if self.done == self.warm:
            self.sections.seconds.clear()
        if self.done == self.warm + self.rounds:
            self.seconds = dict(self.sections.seconds)


def table(seconds: dict[str, float], work: Work, rounds: int) -> str:
    """The parts, the longest first."""
    total = sum(seconds.values())
    lines = ["| part | ms a round | us a local step | share |", "|---|---|---|---|"]
    for part, value in sorted([*seconds.items(), ("all", total)], key=lambda item: -item[1]):
        step = value / rounds / (work.cohort * work.steps)
        lines.append(f"| {part} | {value / rounds * 1e3:.3g} | {step * 1e6:.3g} | {value / total:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="W2", choices=WORKS)
    parser.add_argument("--method", default="FedSMOO", choices=METHODS)
    parser.add_argument("--engine", default="sequential", choices=("sequential", "batched", "graphed"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, help="that count; by default 3, W3 500")
    parser.add_argument("--steps", type=int, help="local steps of a client; by default 10 of W2, else the workload's")
    args = parser.parse_args()
    small = args.work.startswith("W3")
    rounds = args.rounds or (500 if small else 3)
    steps = args.steps or (10 if args.work == "W2" else WORKS[args.work].steps)
    work = workload({"work": args.work, "steps": steps})
    torch.set_num_threads(work.threads)
    sections = Sections()
    # the calls of what is compiled cannot be clocked, and are the same
    clock_all(sections, getattr(fl, args.method), Compiled if args.compile else torch.fx.GraphModule)
    spec = {"method": args.method, "engine": args.engine, "precision": "32-true", "compile": args.compile}
    turns = Turns(sections, 100 if small else 2, rounds)
    ours.run(work, {**spec, "rounds": turns.warm + rounds}, turns)
    engine = f"{args.engine}{', compiled' * args.compile}"
    print(f"{machine()}; {args.work} {args.method}, {engine}, {work.threads} threads\n")
    print(table(turns.seconds, work, rounds))


if __name__ == "__main__":
    main()
