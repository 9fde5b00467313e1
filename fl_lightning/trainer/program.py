"""Consecutive rounds as one program, where nobody looks at the run between them."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Part, value_of
from fl_lightning.core import State, Watched, accumulator_dtype, ensure
from fl_lightning.data.minibatches import CHUNK
from fl_lightning.engine import Job
from fl_lightning.engine.batched import BatchedEngine, by_client, is_out_of_memory
from fl_lightning.trainer.aggregation.base import Mean
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.loggers.base import TAKEN_BACK
from fl_lightning.trainer.round import Clock, divergences, surveyed, total_over
from fl_lightning.trainer.run import Run

MEMORY = 1 << 28
"""Maximum number of bytes of the states of server and clients that a program holds."""


def length(run: Run) -> int:
    """Returns how many rounds may run as one program, from the next one on.

    A program needs rounds of one phase, and clients that train in one block on one process, never fail, and are
    averaged by their mean. It ends before a round that is evaluated, or that a callback needs, and takes no more than
    half of the time that is left, at the pace of the last round.
    """
    objective, engine = run.objective, run.engine
    possible = (
        isinstance(engine, BatchedEngine)
        and engine.width is None
        and type(run.aggregation) is Mean
        and run.fabric.world_size == 1
        and objective.phases == 1
        and not objective.trains_alone
        and run.data.batch_size is not None
        and run.settings.asynchronous is None
        and (run.timing is None or math.isinf(run.timing.clock.max_time_s))
        and not (run.failure_kinds or run.data.stream or run.clients.on_disk or run.should_stop)
    )
    most = TAKEN_BACK * possible
    if most and run.settings.max_time is not None:
        pace = run.metrics.get("time/round_s", math.inf)
        most = min(most, int((run.settings.max_time - run.elapsed) / 2 / pace))
    ahead = range(run.rounds_done, run.rounds_done + most)
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
        trained = _train(run, cohorts) if len(cohorts) > 1 else []
    except (RuntimeError, MemoryError) as error:
        # a part may decompose what is not finite; the next round runs by itself, without it or in smaller blocks
        unfit = is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        if not unfit:
            raise
        trained = []
    training_s = sum(done.training_s for done in trained)
    rows: dict[int, State] = {}
    for cohort, done in zip(cohorts, trained, strict=False):
        rows |= done.rows
        run.apply(run.state.after_round(done.server, done.bits, {"refused": []}), {})
        steps = sum(cohort.attendance.steps.values())
        passes = steps * sum(run.objective.passes)
        spent = clock.spent(run, cohort, done.bits, steps, passes, training_s, rounds=len(trained))
        seconds = run.timing.metrics(run.metrics, [cohort.attendance]) if run.timing else {}
        loss = {"client/train/loss": float(done.losses.mean()), "client/refused": 0}
        run.log({**loss, **divergences(run), **seconds, **spent})
        logged = run.write_metrics()
        if run.should_stop:  # by a logger, as of a single round
            break
    if not trained:
        return False
    again = Cohort.draw(run, cohort.t)
    drawn, now = ((each.clients, [(ctx.lr, ctx.K) for ctx in each.contexts]) for each in (cohort, again))
    ensure(
        drawn == now,
        f"trainer.engine = {run.engine_name}: it draws several rounds ahead, but training has changed clients, steps "
        f"or learning rate of round {cohort.t}; make sampler and learning rate functions of the round, or use "
        "sequential",
    )
    run.clients.stage(rows)
    run.call("on_round_logged", logged)
    return True


@dataclass(frozen=True)
class Trained:
    """The result of a round: the server's state, the clients' by id, their losses ``(clients,)``, bits, and seconds."""

    server: State
    rows: Mapping[int, State]
    losses: Tensor
    bits: int
    training_s: float


def _cohorts(run: Run, n: int) -> list[Cohort]:
    """Returns the cohorts of up to ``n`` rounds: those before one without clients, for which there is memory."""
    cohorts: list[Cohort] = []
    server = sum(value.nbytes for value in run.server.values())
    row = sum(math.prod(shape) for shape in run.clients.shapes.values()) * run.server.w.element_size()
    memory = MEMORY
    room = CHUNK // ((run.data.batch_size or 1) * run.data.sample_bytes(run.dtype))  # in minibatches
    for t in range(run.rounds_done, run.rounds_done + n):
        cohort = Cohort.draw(run, t)
        room -= len(cohort.clients) * max(cohort.attendance.steps.values(), default=0)
        memory -= server + row * len(cohort.clients)
        if room < 0 or memory < 0 or not cohort.clients:
            break
        cohorts.append(cohort)
    return cohorts


def _train(run: Run, cohorts: Sequence[Cohort]) -> list[Trained]:
    """Trains the cohorts one after another; returns the results before the first one that is not finite."""
    objective, engine, rule = run.objective, run.engine, run.aggregation
    assert isinstance(engine, BatchedEngine)
    batches = [[run.minibatches(k, ctx) for k, ctx in zip(c.clients, c.contexts, strict=True)] for c in cohorts]
    server, rows, scratch = run.server, dict[int, State](), objective.scratch_inits()
    # those of others may depend on values
    alike = all(type(part).bits is Part.bits for part in objective.all_parts)
    alike = alike and type(objective).bits is LocalObjective.bits
    results = list[Trained]()
    with engine.checked():
        for cohort, its, block in zip(cohorts, batches, engine.blocks_ahead(batches), strict=True):
            ctx = run.round_context(cohort.t)
            total = partial(total_over, run, server.w, cohort.clients, rows)
            server = value_of(objective.round_start, server, total, ctx)
            sent = objective.begin_phase(server, ctx)
            jobs = [
                Job(k, run.clients.get(k, sent.w, scratch, rows.get(k)), sent, own, each, run.seed, run.varied)
                for k, own, each in zip(cohort.clients, cohort.contexts, its, strict=True)
            ]
            before = time.perf_counter()
            upload, state, ok, losses = engine.train_together(jobs, block)
            training_s = time.perf_counter() - before
            uploads, arrived = rule.uploads(objective, cohort.contexts, ctx, sent.w), by_client(upload, len(jobs))
            for each, client in zip(arrived, cohort.contexts, strict=True):
                uploads.add(each, client.n_k)
            watched = Watched((objective, *objective.all_parts))
            after = objective.finish_phase(server, sent, uploads, ctx)
            trained = dict(zip(cohort.clients, map(State, by_client(state, len(jobs))), strict=True))
            if objective.surveys:
                after = surveyed(run, server.w, after, {**rows, **trained}, ctx)
            server = objective.finish_round(after, server, ctx)
            watched.warn_of_server(numbers=False)
            new = {k: objective.finish_client(row, server) for k, row in trained.items()}
            rows |= new
            up = [objective.bits(each, up=True) for each in arrived[: 1 if alike else None]]
            bits = len(jobs) * objective.bits(sent, up=False) + sum(up) * (len(jobs) // len(up))
            finite = (ok.all() & after.finite()).to(accumulator_dtype(losses.device))
            results.append(Trained(server, new, torch.cat([finite[None], losses.to(finite)]), bits, training_s))
    read = torch.cat(
        [result.losses for result in results]
    ).cpu()  # the only time that the rounds wait for local training
    columns = torch.split(read, [len(result.losses) for result in results])
    finite_rounds = takewhile(lambda pair: bool(pair[1][0]), zip(results, columns, strict=True))
    return [replace(result, losses=column[1:]) for result, column in finite_rounds]
