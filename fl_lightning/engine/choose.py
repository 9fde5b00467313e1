"""Engines by name, and which one to take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core.errors import UserError
from fl_lightning.engine.base import Autocast, Engine, Job
from fl_lightning.engine.batched import BatchedEngine, GraphedEngine
from fl_lightning.engine.sequential import DebugEngine, SequentialEngine

Name = Literal["auto", "sequential", "batched", "graphed", "debug"]

SHORT = 2.0
"""Seconds of a whole run for which it is not worth to measure."""
HEAVY = 0.02
"""Seconds of a local step on a CPU above which what batching saves, the launching of operations, does not matter."""


def make(
    name: Name, objective: LocalObjective, autocast: Autocast, width: int | None = None, compile: bool = False
) -> Engine:
    """An engine.

    Args:
        name: sequential, batched, graphed or debug.
        objective: The local objective.
        autocast: Context for forward passes.
        width: Clients of a block, for the batched ones; null: all.
        compile: Whether the graphed one compiles.

    Raises:
        UserError: If the engine cannot run this objective.
    """
    match name:
        case "batched":
            return BatchedEngine(objective, autocast, width)
        case "graphed":
            return GraphedEngine(objective, autocast, width, compile)
        case "debug":
            return DebugEngine(objective, autocast)
        case _:
            return SequentialEngine(objective, autocast)


def choose(make: Callable[[Name], Engine], jobs: Sequence[Job], rounds: int, compile: bool) -> tuple[Name, str]:
    """The engine with which a run takes least time, measured on the first steps of a cohort.

    Args:
        make: Makes an engine by name.
        jobs: A cohort's share; nothing of the run is changed.
        rounds: Rounds to come, for what an engine costs once.
        compile: Whether the graphed engine compiles.

    Returns:
        Its name, and why, for people.
    """
    steps = sum(job.ctx.K for job in jobs)
    sequential = make("sequential")
    on_cpu = sequential.net.device.type == "cpu"
    _seconds(sequential, jobs[:1], 1)
    step = min(_seconds(sequential, jobs[:1], 2) / min(2, jobs[0].ctx.K) for _ in range(2))
    totals: dict[Name, float] = {"sequential": step * steps * rounds}
    if totals["sequential"] < SHORT and not compile:
        return "sequential", ""
    if on_cpu and step > HEAVY:
        return "sequential", f"a local step takes {step * 1e3:.0f} ms: there is nothing to gain from batching on a CPU"
    told = [f"sequential {step * steps * 1e3:.1f} ms a round"]
    longest = max(job.ctx.K for job in jobs)
    for name in ("batched", "graphed"):
        try:
            engine = make(name)
            first = _seconds(engine, jobs, longest)
            check(engine, sequential, jobs)
            round_s = min(_seconds(engine, jobs, longest) for _ in range(2))
        except UserError as error:
            told.append(f"{name}: {error}")
            continue
        except torch.cuda.OutOfMemoryError:
            told.append(f"{name}: not enough memory for {len(jobs)} clients at once, see trainer.client_block")
            continue
        once = max(0.0, first - round_s)
        totals[name] = once + round_s * rounds
        told.append(f"{name} {round_s * 1e3:.1f} and {once:.1f} s once")
    best = min(totals, key=lambda name: totals[name])
    return best, ", ".join(told)


def check(engine: Engine, sequential: Engine, jobs: Sequence[Job]) -> None:
    """Refuse hooks that do not give for several clients at once what they give for each: one step is compared.

    Raises:
        UserError: If they do not.
    """
    jobs = [_head(job, 1) for job in jobs]
    for job, one, other in zip(jobs, sequential.train(jobs), engine.train(jobs), strict=True):
        update, difference = (float((w - one.w).norm()) for w in (job.received.w, other.w))
        if one.finite and not difference <= 0.1 * update + 1e-5 * float(one.w.norm()):  # far above rounding in bfloat16
            raise UserError(
                f"trainer.engine = {engine.name}: {type(engine.objective).__name__} gives for several clients at once "
                "(vectors of shape (clients, d)) something else than for each; reduce over the last axis only, kept, "
                "or use sequential"
            )


def _head(job: Job, steps: int) -> Job:
    return replace(job, minibatches=job.minibatches.head(steps), ctx=replace(job.ctx, K=min(steps, job.ctx.K)))


def _seconds(engine: Engine, jobs: Sequence[Job], steps: int) -> float:
    """Time of the first ``steps`` steps of each job."""
    short = [_head(job, steps) for job in jobs]
    started = time.perf_counter()
    for _ in engine.train(short):
        pass
    if engine.net.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
