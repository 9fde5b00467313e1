"""Seconds a round of ours, of a plain loop, and of pfl, Flower and JAX where they are installed, side by side.

``make bench`` runs everything; a part is run again by, for example,

    python benchmarks/bench_engine.py --work W1,W3 --methods FedAvg --turns 3

and takes its place among the rows of docs/benchmarks.csv. Every contestant is a process that stays alive; they work one
at a time, in turns A B C A B C, so that a slow minute of the machine hits them all. What others take of the cores
meanwhile is recorded, and turns under such load are dropped if enough are left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contest import report
from contest.report import BF16, CEILING, COMPILED, FP32, LOAD, Row, known
from contest.workloads import METHODS, WORKS

HERE = Path(__file__).resolve().parent
PATIENCE = 600.0  # seconds for an answer
FORMATS = {"32-true": "float32", "bf16-mixed": "bfloat16"}
TICK = os.sysconf("SC_CLK_TCK")
PEERS = {"peer_pfl": ("pfl", "pfl"), "peer_flower": ("Flower", "ray"), "peer_jax": ("JAX", "jax")}
"""The contestant's name, and the module that it needs."""


def contestants(work: str, method: str, peers: bool) -> dict[str, dict[str, Any]]:
    """The contestants, by name."""
    found: dict[str, dict[str, Any]] = {"plain loop": {"kind": "plain"}}
    if peers and method == "FedAvg" and work != "W2":
        found["pfl"] = {"kind": "peer_pfl"}
        if work != "W3-CNN":
            found["Flower"] = {"kind": "peer_flower"}
    if peers and method in ("FedAvg", "FedSAM") and work.startswith("W3"):
        found["JAX"] = {"kind": "peer_jax"}
    ours: dict[str, dict[str, Any]] = {FP32: {}, BF16: {"precision": "bf16-mixed"}}
    if work.startswith("W3"):
        engines = {name: {"engine": name} for name in ("sequential", "batched", "graphed")}
        ours = {FP32: {}, **engines, COMPILED: {"engine": "graphed", "compile": True}}
    elif work == "W1" and method == "FedAvg":
        ours["batched"] = {"engine": "batched"}
    base = {"kind": "ours", "engine": "auto", "precision": "32-true", "compile": False}
    return {**found, **{name: {**base, **spec} for name, spec in ours.items()}}


@dataclass
class Turn:
    """One turn: the numbers of each round, CPU seconds per round, and the share of the cores that others used."""

    rounds: list[dict[str, float]]
    cpu: float
    foreign: float

    @property
    def seconds(self) -> float:
        return self.median("round_s")

    def median(self, key: str) -> float:
        return statistics.median(r.get(key, math.nan) for r in self.rounds)


@dataclass
class Contestant:
    """A worker process, idle between its turns."""

    name: str
    spec: dict[str, Any]
    n: int = 1
    turns: list[Turn] = field(default_factory=list)
    peak: float = math.nan
    engine: str = ""

    def __post_init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "contest.worker", json.dumps(self.spec)], cwd=HERE, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def set_up(self) -> None:
        print(0, file=self.process.stdin, flush=True)
        self.engine = self.answer()

    def answer(self) -> Any:
        """Its next line."""
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.log.seek(0)
            last = [line.strip() for line in self.log if line.strip()][-1:] or ["no answer"]
            raise RuntimeError(last[0] if ready else f"no answer in {PATIENCE:.0f} s")
        return json.loads(line)

    def turn(self, n: int) -> Turn:
        """Trains ``n`` rounds."""
        watch = Watch(self.process.pid)
        print(n, file=self.process.stdin, flush=True)
        rounds = self.answer()
        cpu, foreign = watch.stop()
        self.peak = sum(_status(pid, "VmHWM") for pid in _tree(self.process.pid)) / 2**20
        return Turn(rounds, cpu / n, foreign)

    def kept(self) -> list[int]:
        """Which turns count: those without foreign load, or all if there are less than two of them."""
        clean = [i for i, turn in enumerate(self.turns) if not turn.foreign > LOAD]
        return clean if len(clean) >= 2 else list(range(len(self.turns)))

    def close(self) -> None:
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


class Watch:
    """CPU seconds of a process and its children, and the share of all cores that others use meanwhile."""

    def __init__(self, pid: int) -> None:
        self.pid, self.started = pid, time.perf_counter()
        self.before = self._read()

    def stop(self) -> tuple[float, float]:
        wall = time.perf_counter() - self.started
        own, busy = (after - before for after, before in zip(self._read(), self.before, strict=True))
        return own, max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    def _read(self) -> tuple[float, float]:
        try:
            busy = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        except OSError:  # no Linux
            return math.nan, math.nan
        own = 0
        for pid in _tree(self.pid):
            with suppress(OSError):  # it has just ended
                own += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        user, nice, system, _, _, irq, softirq, steal = map(int, busy[:8])
        return own / TICK, (user + nice + system + irq + softirq + steal) / TICK


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def _status(pid: int, key: str) -> float:
    """A value in KiB of /proc/<pid>/status."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(key)), 0.0)


def succeeds(do: Callable[[Contestant], object], player: Contestant) -> bool:
    try:
        do(player)
    except (RuntimeError, OSError) as error:
        print(f"  {player.name} fails and is left out: {error}", flush=True)
        return False
    return True


def compete(specs: dict[str, dict[str, Any]], turns: int, rounds: int, seconds: float) -> list[Contestant]:
    """Starts all, then lets them take turns; one that fails is reported and left out."""
    with ExitStack() as stack:
        players = [Contestant(name, spec) for name, spec in specs.items()]
        for close in [player.close for player in players] + [player.process.stdin.close for player in players]:
            stack.callback(close)  # the last ones first: all are asked to end before one is waited for

        def everyone(do: Callable[[Contestant], object]) -> None:
            players[:] = [player for player in players if succeeds(do, player)]

        def warm_up(player: Contestant) -> None:
            player.set_up()  # alone: engines may be chosen by their time
            warm = player.turn(5 if player.spec["work"].startswith("W3") else 1)
            player.n = max(rounds, math.ceil(seconds / warm.rounds[-1]["round_s"]))

        everyone(Contestant.answer)  # imported
        everyone(warm_up)
        for cycle in range(2 * turns):  # as many again if the machine was not quiet
            if cycle >= turns and all(sum(t.foreign <= LOAD for t in p.turns) >= min(2, turns) for p in players):
                break
            everyone(lambda player: player.turns.append(player.turn(player.n)))
        return players


def row(player: Contestant, players: list[Contestant], floors: dict[str, Any]) -> Row:
    """The row of one contestant."""
    kept = player.kept()
    turns = [player.turns[i] for i in kept]
    every = [r["round_s"] for turn in turns for r in turn.rounds]
    found: Row = {
        "engine": player.engine,
        "round_s": statistics.median(every), "round_min": min(every), "round_max": max(every),
        "cpu_s": statistics.median(turn.cpu for turn in turns),
        "loop_s": statistics.median(r["loop_s"] for turn in turns for r in turn.rounds),
        **known(
            orchestration_s=statistics.median(turn.median("orchestration_s") for turn in turns), peak_gb=player.peak,
        ),
        "rounds": len(every), "turns": len(turns), "dropped": len(player.turns) - len(turns),
        "foreign": max(turn.foreign for turn in turns),
    }  # fmt: skip
    precision = player.spec.get("precision", "32-true")
    if floors:
        found |= floors[precision]["rounds"][player.spec["method"]]
        found["of_floor"] = found["floor_s"] / found["round_s"]
    for short, name in report.AGAINST.items():
        for other in players:
            if other.name == name and other is not player:
                theirs = other.kept()
                both = sorted(set(kept) & set(theirs))
                pairs = zip(both, both, strict=True) if both else zip(theirs, kept, strict=False)
                ratios = [other.turns[i].seconds / player.turns[j].seconds for i, j in pairs]
                ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
                found |= {f"vs_{short}": ratio, f"vs_{short}_low": low, f"vs_{short}_high": high}
    return found


def ceilings(spec: dict[str, Any]) -> dict[str, Any]:
    """The floor and the rates of its kernels, or nothing if the machine is busy in three attempts."""
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "contest.ceilings", json.dumps(spec)], cwd=HERE, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        watch = Watch(process.pid)
        line = process.stdout.readline()  # it ends after this line, but not before it is read
        _, foreign = watch.stop()
        process.communicate()
        if not line:
            raise RuntimeError("contest.ceilings has failed")
        if not foreign > LOAD:
            return json.loads(line)
    print(f"{spec['work']}: no floor, others use {foreign:.0%} of the cores", flush=True)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="W1,W2,W3", help="W1, W2, W3, W3-MLP, W3-CNN")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", help="contestants by name, separated by ;")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a turn, at least")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn, at least")
    parser.add_argument("--steps", type=int, default=10, help="local steps of W2; the papers have 50")
    parser.add_argument("--threads", type=int, default=2, help="of W1 and W2; W3 has 1")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="pfl, Flower and JAX")
    args = parser.parse_args()
    missing = {kind for kind, (name, module) in PEERS.items() if args.peers and find_spec(module) is None}
    for kind in missing:
        print(f"{PEERS[kind][0]} is left out: python -m pip install -r benchmarks/requirements.txt")
    machine, rows = report.machine(), []
    print(f"{machine}; load average {os.getloadavg()[0]:.2f}", flush=True)
    for work in [name for name in WORKS if any(name.startswith(wanted) for wanted in args.work.split(","))]:
        common = {"work": work}
        if not work.startswith("W3"):
            common["threads"] = args.threads
        if work == "W2":
            common["steps"] = args.steps
        floors = ceilings(common)
        for precision, found in floors.items():
            for kernel, rate in found["rates"].items():
                name = {"method": CEILING, "contestant": f"{kernel}, {FORMATS[precision]}"}
                rows.append({"machine": machine, "work": work, **name, "gflops": rate / 1e9})
        for method in args.methods.split(","):
            specs = {
                name: {**spec, **common, "method": method}
                for name, spec in contestants(work, method, args.peers).items()
                if spec["kind"] not in missing and (args.only is None or name in args.only.split(";"))
            }
            started = time.perf_counter()
            players = compete(specs, args.turns, args.rounds, args.seconds)
            fixed = {"machine": machine, "work": work, "method": method}
            fixed |= {
                "threads": common.get("threads", WORKS[work].threads),
                "steps": common.get("steps", WORKS[work].steps),
            }
            rows += [{**fixed, "contestant": p.name, **row(p, players, floors)} for p in players]
            times = ", ".join(f"{r['contestant']} {r['round_s']:.4g} s" for r in rows[-len(players) :])
            print(f"{work} {method}: {times} [{time.perf_counter() - started:.0f} s]", flush=True)
            report.write(rows)
    print(report.tables([r for r in report.read() if r["machine"] == machine]))


if __name__ == "__main__":
    main()
