"""Consecutive rounds as one program, where nobody looks at the run between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import State
from fl_lightning.data.minibatches import CHUNK
from fl_lightning.engine import Job, rounds
from fl_lightning.engine.batched import BatchedEngine, by_client, is_out_of_memory
from fl_lightning.engine.graphed import GraphedEngine
from fl_lightning.engine.rounds import Trained, Training, log_of
from fl_lightning.trainer.aggregation.base import Mean
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.round import Clock
from fl_lightning.trainer.run import Run

LONGEST = 100
"""Maximum number of rounds of a program."""


def length(run: Run) -> int:
    """Returns how many rounds may run as one program, from the next one on.

    A program needs rounds of one phase, and clients that train in one block on one process, never fail, and are
    averaged by their mean. It ends before a round that is evaluated, or that a callback needs.
    """
    objective, engine = run.objective, run.engine
    possible = (
        isinstance(engine, BatchedEngine)
        and engine.width is None
        and type(run.aggregation) is Mean
        and run.fabric.world_size == 1
        and objective.phases == 1
        and run.data.batch_size is not None
        and run.settings.max_time is None
        and not (run.failure_kinds or run.data.stream or run.clients.on_disk or run.should_stop)
        and all(type(part).bits is Part.bits for part in objective.all_parts)  # others may depend on the values
    )
    ahead = range(run.rounds_done, run.rounds_done + LONGEST * possible)
    return sum(1 for _ in takewhile(lambda t: not run.needs_round(t), ahead))


def train(run: Run) -> bool:
    """Trains and logs the next rounds if they may run as one program: with the same bits as one by one.

    Cohorts and minibatches are drawn ahead. Of the hooks of callbacks only `on_round_logged` is called, after the last
    of the rounds. The program ends before a round with a result that is not finite, or without clients.

    Returns:
        Whether it has trained any; otherwise the run is as before.
    """
    clock = Clock()
    cohorts = _cohorts(run, length(run))
    try:
        trained, training_s = _train(run, cohorts) if len(cohorts) > 1 else (None, 0.0)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        trained = None  # the next round runs by itself, in smaller blocks
    if trained is None:
        return False
    number = len(trained.logs)
    for cohort, log, bits in zip(cohorts, trained.logs, trained.bits, strict=False):
        run.apply(run.state.after_round(trained.server, bits, {"refused": []}), {})
        steps = sum(cohort.attendance.steps.values())
        spent = clock.spent(run, cohort, bits, steps, training_s, rounds=number)
        run.log({"client/train/loss": float(log[1:].mean()), "client/refused": 0, **spent})
        logged = run.write_metrics()
    run.clients.stage(trained.rows)
    run.call("on_round_logged", logged)
    return True


def _cohorts(run: Run, n: int) -> list[Cohort]:
    """Returns the cohorts of up to ``n`` rounds: those before one without clients, whose samples can be gathered."""
    cohorts: list[Cohort] = []
    room = CHUNK // ((run.data.batch_size or 1) * run.data.sample_bytes(run.dtype))  # in minibatches
    for t in range(run.rounds_done, run.rounds_done + n):
        cohort = Cohort.draw(run, t)
        room -= len(cohort.clients) * max(cohort.attendance.steps.values(), default=room + 1)
        if room < 0:
            break
        cohorts.append(cohort)
    return cohorts


def _train(run: Run, cohorts: Sequence[Cohort]) -> tuple[Trained | None, float]:
    """Trains the cohorts one after another, up to the first one that is not finite.

    Returns:
        What they end with, None if that is the first one; and the seconds of local training.
    """
    engine = run.engine
    assert isinstance(engine, BatchedEngine)
    batches = [[run.minibatches(k, ctx) for k, ctx in zip(c.clients, c.contexts, strict=True)] for c in cohorts]
    each = zip(cohorts, batches, engine.blocks_ahead(batches), strict=True)
    training = [Training(c.clients, c.contexts, its, block) for c, its, block in each]
    known = {k: row for c in cohorts for k in c.clients if (row := run.clients.row(k))}
    before, by_hooks, started = Trained(run.server, known), partial(_by_hooks, run), time.perf_counter()
    with engine.checked():
        if isinstance(engine, GraphedEngine) and not run.varied:
            trained = rounds.train(engine, before, training, run.clients.inits, run.clients.w0, by_hooks)
        else:
            trained = by_hooks(before, training)
    read = torch.cat([*trained.logs]).cpu()  # the only time that the rounds wait for local training
    logs = torch.split(read, [len(log) for log in trained.logs])
    finite = sum(1 for _ in takewhile(lambda log: bool(log[0]), logs))
    if finite < len(cohorts):
        return _train(run, cohorts[:finite]) if finite else (None, 0.0)
    return replace(trained, logs=logs), time.perf_counter() - started


def _by_hooks(run: Run, before: Trained, training: Sequence[Training]) -> Trained:
    """Trains rounds one after another, each by its hooks."""
    objective, engine, rule = run.objective, run.engine, run.aggregation
    assert isinstance(engine, BatchedEngine)
    server, rows, scratch = before.server, dict(before.rows), objective.scratch_inits()
    logs, bits = list[Tensor](), list[int]()
    for each in training:
        ctx = run.round_context(each.contexts[0].t)
        sent = objective.begin_phase(server, ctx)
        jobs = [
            Job(k, run.clients.get(k, sent.w, scratch, rows.get(k)), sent, own, its, run.seed, run.varied)
            for k, own, its in zip(each.clients, each.contexts, each.minibatches, strict=True)
        ]
        upload, state, ok, losses = engine.train_together(jobs, each.block)
        uploads, arrived = rule.uploads(objective, each.contexts, ctx, sent.w), by_client(upload, len(jobs))
        for sum_of, client in zip(arrived, each.contexts, strict=True):
            uploads.add(sum_of, client.n_k)
        after = objective.finish_phase(server, sent, uploads, ctx)
        server = objective.finish_round(after, server, ctx)
        rows |= zip(each.clients, map(State, by_client(state, len(jobs))), strict=True)
        bits.append(len(jobs) * (objective.bits(sent, up=False) + objective.bits(arrived[0], up=True)))
        logs.append(log_of(ok, after, losses))
    return Trained(server, rows, logs, bits)
