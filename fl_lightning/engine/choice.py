"""Engines by name, and the choice of the quickest."""

import time
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from fl_lightning.core import UserError, wait_for
from fl_lightning.engine.agreement import check, excerpt
from fl_lightning.engine.base import Engine, Job
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.graphed import GraphedEngine
from fl_lightning.engine.sequential import DebugEngine, SequentialEngine

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (SequentialEngine, BatchedEngine, GraphedEngine, DebugEngine)
}
"""The package's engines by name; a further one is a class, and its entry here."""
NAMES = ("auto", *ENGINES)
if TYPE_CHECKING:
    EngineName: TypeAlias = str
else:
    EngineName = Literal[NAMES]


def is_name(name: object) -> bool:
    """Returns whether this may name an engine: one of the package, or by an import path one of somebody's own."""
    return isinstance(name, str) and (name in NAMES or (all(map(str.isidentifier, name.split("."))) and "." in name))


def name_of(engine: str | type[Engine]) -> EngineName:
    """Returns the name of an engine; that of a class of somebody's own is its import path.

    Raises:
        UserError: As `engine_class`.
    """
    if isinstance(engine, str):
        return engine
    if ENGINES.get(engine.name) is engine:
        return engine.name
    engine_class(path := f"{engine.__module__}.{engine.__qualname__}")
    return path


def engine_class(name: EngineName) -> type[Engine]:
    """Returns the class of an engine by its name.

    Raises:
        UserError: If it is no engine of the package, and no class that Python can import.
    """
    try:
        return ENGINES.get(name) or resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: it is defined in a function
        raise UserError(
            f"trainer.engine = {name}: cannot be imported ({error}); give a class at the top level of a module that "
            "Python can import"
        ) from None


class Choice(NamedTuple):
    """An engine that has been chosen.

    Attributes:
        name: Its name.
        reason: Why it was chosen, in one line; "" if nothing was compared.
        seconds: The seconds that it needs for local training in all rounds to come.
    """

    name: EngineName
    reason: str
    seconds: float


SHORT = 2.0
"""Seconds of a whole run below which no engine is measured."""
HEAVY = 0.02
"""Seconds of a local step on a CPU above which batching is not tried: it only saves the time to launch operations."""


def choose(make: Callable[[EngineName], Engine], jobs: Sequence[Job], rounds: int, compile: bool) -> Choice:
    """Returns the engine with which a run takes the least time, measured on the first steps of a cohort.

    Args:
        make: Makes an engine by name.
        jobs: One process's share of a cohort; nothing of the run changes.
        rounds: Rounds to come, over which the one-time cost of an engine is spread.
        compile: Whether the graphed engine compiles.
    """
    steps = sum(job.ctx.K for job in jobs)
    sequential = make("sequential")
    _seconds(sequential, jobs[:1], 1)
    step = min(_seconds(sequential, jobs[:1], 2) / min(2, jobs[0].ctx.K) for _ in range(2))
    totals: dict[EngineName, float] = {"sequential": step * steps * rounds}
    if totals["sequential"] < SHORT and not compile:
        return Choice("sequential", "", totals["sequential"])
    if sequential.net.device.type == "cpu" and step > HEAVY:
        reason = f"a local step takes {step * 1e3:.0f} ms: there is nothing to gain from batching on a CPU"
        return Choice("sequential", reason, totals["sequential"])
    measured = [f"sequential {step * steps * 1e3:.1f} ms a round"]
    for name in [name for name, engine in ENGINES.items() if engine.trains_several]:
        try:
            engine = make(name)
            first = _seconds(engine, jobs)
            check(engine, sequential, jobs)
            round_s = seconds(engine, jobs)
        except UserError as error:
            measured.append(f"{name}: {error}")
            continue
        startup_s = max(0.0, first - round_s)
        totals[name] = startup_s + round_s * rounds
        measured.append(f"{name} {round_s * 1e3:.1f} and {startup_s:.1f} s once")
    best = min(totals, key=lambda name: totals[name])
    return Choice(best, ", ".join(measured), totals[best])


def seconds(engine: Engine, jobs: Sequence[Job]) -> float:
    """Returns the seconds that an engine takes to train these jobs, once it has warmed up."""
    return min(_seconds(engine, jobs) for _ in range(2))


def _seconds(engine: Engine, jobs: Sequence[Job], steps: int | None = None) -> float:
    """Returns the time of the first ``steps`` steps of each job; None: of all."""
    short = [excerpt(job, range(len(job.minibatches))[:steps]) for job in jobs]
    wait_for(engine.net.device)  # what was launched before does not count
    started = time.perf_counter()
    for _ in engine.train(short):
        pass
    wait_for(engine.net.device)
    return time.perf_counter() - started
