"""Cases side by side: each is a process that stays alive, and they work in turns A B C A B C, after a warm-up.

So a slow minute of the machine hits them all. What other programs take of the cores meanwhile is recorded, and turns
under such load are repeated. A case is a function of its settings and of `Turns`, which it tells what it has done::

    def run(settings, turns):
        ...  # it sets up
        turns.ready()
        while True:
            ...  # a round, or whatever the unit of this case is
            turns.done(seconds)
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 3600.0
"""Seconds for an answer."""
LOAD = 0.06
"""Largest share of all cores that other programs may use during a turn."""
TICK = os.sysconf("SC_CLK_TCK")
Row = dict[str, Any]


class Case(NamedTuple):
    """What is measured.

    Attributes:
        name: In the table.
        run: The function, such as ``contest.plain.run``.
        settings: Its first argument; ``threads`` of torch are 1 where they do not say otherwise.
        warm: Units of a warm-up, which do not count; there are two, and the second one sets how long a turn is.
        whole: Whether it ends by itself, so that it has one turn; the first ``warm`` units of that do not count.
    """

    name: str
    run: str
    settings: dict[str, Any]
    warm: int = 1
    whole: bool = False


class Turns:
    """A case's side: it blocks while it is the others' turn.

    Attributes:
        left: Units that this turn still has.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever libraries print goes to stderr
        self.left, self._units = 0, list[dict[str, float]]()

    def ready(self, **about: Any) -> None:
        """Answers that all is set up, with what the row is to say of it, and waits."""
        self._answer(about)

    def done(self, seconds: float, **numbers: float) -> None:
        """Counts a unit that is done."""
        self._units.append({"seconds": seconds, **numbers})
        self.left -= 1
        if self.left == 0:
            self._answer(self._units)

    def end(self, numbers: dict[str, float] | None) -> None:
        """Answers that the case has ended by itself; these numbers are of all of it."""
        self._answer([*self._units, *([numbers] if numbers else [])])

    def _answer(self, value: Any) -> None:
        print(json.dumps(value), file=self._answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.left, self._units = int(line), []


class Turn(NamedTuple):
    """The numbers of each unit, CPU seconds of one, and the share of the cores that others used."""

    units: list[dict[str, float]]
    cpu: float
    foreign: float

    @property
    def seconds(self) -> float:
        return median(of(self.units, "seconds"))


class Player:
    """A case's process, idle between its turns; ``about`` is what it says of itself."""

    def __init__(self, case: Case) -> None:
        self.case, self.n, self.turns = case, 1, list[Turn]()
        self.about: dict[str, Any] = {}
        self.peak = self.before = math.nan
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness", case.run, json.dumps(case.settings)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def answer(self) -> Any:
        """Returns its next line.

        Raises:
            RuntimeError: If it has ended, or does not answer.
        """
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.log.seek(0)
            last = [line.strip() for line in self.log if line.strip()][-1:] or ["no answer"]
            raise RuntimeError(last[0] if ready else f"no answer in {PATIENCE:.0f} s")
        return json.loads(line)

    def ask(self, n: int) -> Any:
        print(n, file=self.process.stdin, flush=True)
        return self.answer()

    def set_up(self, rounds: int, seconds: float) -> None:
        """Sets up and warms up; a turn then has ``rounds`` units, and takes ``seconds``, at least."""
        self.about = self.ask(0)  # alone: engines may be chosen by their time
        self.before = self._memory("VmRSS")
        if not self.case.whole:
            self.ask(self.case.warm)
            pace = median(of(self.ask(self.case.warm), "seconds"))  # what is recorded or compiled at first is done
            self.n = max(rounds, math.ceil(seconds / pace))

    def turn(self) -> None:
        watch = Watch(self.process.pid)
        units = self.ask(10**9 if self.case.whole else self.n)
        cpu, foreign = watch.stop()
        self.peak = self._memory("VmHWM")
        n = len(of(units, "seconds")) or 1
        self.turns.append(Turn(units[self.case.warm * self.case.whole :], cpu / n, foreign))

    def _memory(self, key: str) -> float:
        return sum(_status(pid, key) for pid in _tree(self.process.pid)) / 2**20

    def kept(self) -> list[int]:
        """Returns which turns count: those without foreign load, or all if there are less than two of them."""
        clean = [i for i, turn in enumerate(self.turns) if not turn.foreign > LOAD]
        return clean if len(clean) >= 2 else list(range(len(self.turns)))

    def close(self) -> None:
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in _tree(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


class Watch:
    """CPU seconds of a process and its children, and the share of all cores that others use meanwhile."""

    def __init__(self, pid: int) -> None:
        self.pid, self.started = pid, time.perf_counter()
        self.before = self._read()

    def stop(self) -> tuple[float, float]:
        wall = time.perf_counter() - self.started
        cpu, busy = (after - before for after, before in zip(self._read(), self.before, strict=True))
        return cpu, max(0.0, busy - cpu) / (wall * (os.cpu_count() or 1))

    def _read(self) -> tuple[float, float]:
        try:
            busy = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        except OSError:  # no Linux
            return math.nan, math.nan
        ticks = 0
        for pid in _tree(self.pid):
            with suppress(OSError):  # it has just ended
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        user, nice, system, _, _, irq, softirq, steal = map(int, busy[:8])
        return ticks / TICK, (user + nice + system + irq + softirq + steal) / TICK


def _tree(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


def _status(pid: int, key: str) -> float:
    """Returns a value in KiB of /proc/<pid>/status."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(key)), 0.0)
    return 0.0


def compete(cases: Iterable[Case], turns: int = 3, rounds: int = 1, seconds: float = 0.5) -> list[Player]:
    """Starts all cases, and lets them take turns; one that fails is reported and left out."""
    with ExitStack() as stack:
        players = [Player(case) for case in cases]
        for close in [player.close for player in players] + [player.process.stdin.close for player in players]:
            stack.callback(close)  # the last ones first: all are asked to end before one is waited for

        def everyone(do: Callable[[Player], object]) -> None:
            players[:] = [player for player in players if _succeeds(do, player)]

        everyone(Player.answer)  # imported
        everyone(lambda player: player.set_up(rounds, seconds))
        for cycle in range(2 * turns):  # as many again if the machine was not quiet
            if cycle >= turns and all(sum(t.foreign <= LOAD for t in p.turns) >= min(2, turns) for p in players):
                break
            everyone(lambda player: None if player.case.whole and player.turns else player.turn())
        return players


def _succeeds(do: Callable[[Player], object], player: Player) -> bool:
    try:
        do(player)
    except (RuntimeError, OSError) as error:
        print(f"  {player.case.name} fails and is left out: {error}", file=sys.stderr, flush=True)
        return False
    return True


def of(units: Sequence[dict[str, float]], key: str) -> list[float]:
    """Returns what units say of a number; those that do not say anything are left out."""
    return [unit[key] for unit in units if unit.get(key) is not None]


def row(player: Player, players: Sequence[Player], against: Iterable[str] = ()) -> Row:
    """Returns the row of a case: medians, smallest and largest values, ratios to other cases within the same turns."""
    kept = player.kept()
    turns = [player.turns[i] for i in kept]
    units = [unit for turn in turns for unit in turn.units]
    numbers = {key: median(of(units, key)) for unit in units for key in unit if unit[key] is not None}
    seconds = of(units, "seconds")
    cells: Row = {
        "case": player.case.name, **player.about, **({"low": min(seconds), "high": max(seconds)} if seconds else {}),
        "cpu_s": median(turn.cpu for turn in turns), **numbers, "peak_gb": player.peak,
        "more_gb": player.peak - player.before, "units": len(seconds), "turns": len(turns),
        "dropped": len(player.turns) - len(turns), "foreign": max(turn.foreign for turn in turns),
    }  # fmt: skip
    for rival in players:
        if rival.case.name in against and rival is not player:
            theirs = rival.kept()
            common = sorted({*kept} & {*theirs})
            pairs = zip(common, common, strict=True) if common else zip(theirs, kept, strict=False)
            ratios = [rival.turns[i].seconds / player.turns[j].seconds for i, j in pairs]
            name = f"vs {rival.case.name}"
            cells |= {name: median(ratios), f"{name}, low": min(ratios), f"{name}, high": max(ratios)}
    return cells


def machine() -> str:
    """Returns the processor, its cores, how it computes in bfloat16, and torch."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"model name\s*: (.*)", info)
    flags = set(match[1].split()) if (match := re.search(r"flags\s*: (.*)", info)) else set()
    bf16 = ["AMX-bf16"] * ("amx_bf16" in flags) + ["AVX512-bf16"] * ("avx512_bf16" in flags)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {' and '.join(bf16) or 'no bf16 units'}, torch {version('torch')}"


def main() -> None:
    import torch

    run, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(settings.get("threads", 1))
    torch.manual_seed(0)
    module, _, function = run.rpartition(".")
    do = getattr(importlib.import_module(module), function)
    turns = Turns()
    turns.ready()
    turns.end(do(settings, turns))


if __name__ == "__main__":
    main()
