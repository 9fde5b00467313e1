"""Consecutive rounds as one program, where nobody looks at the run between them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from fl_lightning.core import Logs, State, ensure
from fl_lightning.data.minibatches import CHUNK
from fl_lightning.engine.batched import BatchedEngine, is_out_of_memory
from fl_lightning.engine.recorded_rounds import rounds_of
from fl_lightning.engine.rounds import Drawn, Table, Trained
from fl_lightning.trainer.aggregation.base import Mean
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.loggers.base import TAKEN_BACK
from fl_lightning.trainer.measurements.clients import evaluate_round
from fl_lightning.trainer.received import divergences
from fl_lightning.trainer.round import Stopwatch
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives

SHOWN_S = 0.5
"""Seconds after which a program ends with the next round that is evaluated."""
MEMORY = 1 << 28
"""Maximum number of bytes of the states of server and clients that a program holds."""


NEEDS: Mapping[str, Callable[[Run], bool]] = {
    "the engine batched or graphed": lambda run: isinstance(run.engine, BatchedEngine),
    "all clients in one block (no client_block)": lambda run: getattr(run.engine, "width", None) is None,
    "one process, or deterministic": lambda run: run.fabric.world_size == 1 or run.settings.deterministic,
    "one config, or one seed": lambda run: not run.varied,
    "rounds of one phase": lambda run: run.objective.phases == 1,
    "clients that train in rounds only (no Ditto)": lambda run: not run.objective.trains_alone,
    "a server that sums nothing over what all clients keep": lambda run: not run.objective.sums_over_kept,
    "the mean of uploads (no aggregation, no privacy)": lambda run: type(run.aggregation) is Mean,
    "rounds (no asynchronous)": lambda run: run.settings.asynchronous is None,
    "uploads that arrive as they are (no faults.corrupt)": lambda run: run.settings.faults.corrupt is None,
    "minibatches (data.batch_size)": lambda run: run.data.batch_size is not None,
    "samples in memory (no stream)": lambda run: not run.data.stream,
    "the clients' state in memory (client_memory)": lambda run: not run.clients.on_disk,
}
"""What a run needs for its rounds to be programs, in the words of `plan` and of the documentation."""


def lacking(run: Run) -> list[str]:
    """Returns what of `NEEDS` a run does not have."""
    return [need for need, has in NEEDS.items() if not has(run)]


def length(run: Run) -> int:
    """Returns how many rounds may run as one program, from the next one on, in a run that has all of `NEEDS`.

    The first round of a process is none: hooks make their caches in it. A program ends with a round at whose end a
    callback needs the run, before one of which a callback needs the local models, and takes no more than half of the
    time that is left, at the pace of the last round and its evaluation. If it takes long, before the first evaluation
    and with several processes, it ends with a round that is evaluated.
    """
    possible = run.rounds_done > run.first_round and not run.should_stop and not lacking(run)
    pace, spent, n = run.metrics.get("time/round_s", math.inf), 0.0, 0
    time_left = math.inf if run.settings.max_time is None else (run.settings.max_time - run.elapsed) / 2
    for t in range(run.rounds_done, run.rounds_done + TAKEN_BACK * possible):
        evaluated = run.evaluates(t + 1)
        spent += pace + evaluated * run.evaluation_s
        if spent > time_left:
            break
        is_shown = run.fabric.world_size > 1 or not run.evaluation_s or spent > SHOWN_S
        is_last = run.needs_round(t) or (evaluated and is_shown)
        n += not (is_last and run.needs_local_models(t))
        if is_last:
            break
    return run.fabric.broadcast(n) if run.settings.deterministic else n


def train(run: Run) -> tuple[dict[str, float], list[float]] | None:
    """Trains the next rounds if they may run as one program: with the same bits as one by one.

    Cohorts and minibatches are drawn ahead. All rounds but the last one are evaluated, if that is due, and logged; no
    hook is called but `on_round_logged` of those that are evaluated. The program ends before a round with a result that
    is not finite, or without clients.

    Returns:
        Metrics of the last round, and the training loss of each client; None: it has trained nothing.
    """
    watch, before = Stopwatch(run), run.server
    cohorts = _cohorts(run, length(run))
    try:
        trained, rows = _train(run, before, cohorts) if cohorts else ([], {})
    except (RuntimeError, MemoryError) as error:
        # a part may decompose what is not finite; the next round runs by itself, without it or in smaller blocks
        unfit = is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        # or else one of several processes would go on alone, and the others wait for it
        agreed = run.fabric.world_size == 1 or (run.rounds is not None and run.rounds.agreed)
        if not (unfit and agreed):
            raise
        trained, rows = [], {}
    if not trained:
        return None
    training_s, last = sum(result.training_s for result in trained), len(trained) - 1
    is_first = run.fabric.is_global_zero  # its loggers say where the program ends
    last = last if is_first else run.fabric.broadcast(last)
    for i, (cohort, result) in enumerate(zip(cohorts, trained, strict=False)):
        failed = {"refused": [], **{kind: getattr(cohort.attendance, kind) for kind in run.failure_kinds}}
        run.apply(run.state.after_round(result.server, result.bits, failed), {})
        n, names = len(cohort.clients), run.objective.all_logs
        steps, (losses, rows_of, of_server) = sum(cohort.attendance.steps.values()), result.split(n, len(names))
        passes = steps * sum(run.contract[0].passes)
        metrics = {
            "client/train/loss": float(losses.mean()),
            **Logs.means(names, rows_of, of_server),
            **{f"client/{kind}": len(clients) for kind, clients in failed.items()},
            **divergences(run),
            **(run.timing.metrics(run.metrics, [cohort.attendance]) if run.timing else {}),
            **watch.spent(cohort, result.bits, steps, passes, training_s, rounds=len(trained)),
        }
        if i == last:
            break
        run.note(metrics)
        with watch.paused():
            if evaluated := run.evaluates(run.rounds_done):
                evaluate_round(run, losses.tolist())
            logged = run.write_metrics()
        if evaluated:
            run.call("on_round_logged", logged)
        if is_first and run.should_stop and i + 1 < last:  # by a logger: the next round is the last one
            last = i + 1
    if is_first:
        run.fabric.broadcast(last)
    if last + 1 < len(trained):
        _, rows = _train(run, before, cohorts[: last + 1])
    again = Cohort.draw(run, cohort.t)
    drawn, redrawn = ((draw.clients, [(ctx.lr, ctx.K) for ctx in draw.contexts]) for draw in (cohort, again))
    ensure(
        drawn == redrawn,
        f"trainer.engine = {run.engine_name}: it draws several rounds ahead, but training has changed clients, steps "
        f"or learning rate of round {cohort.t}; make sampler and learning rate functions of the round, or use "
        "sequential",
    )
    run.clients.stage(rows)
    return metrics, losses.tolist()


def _cohorts(run: Run, n: int) -> list[Cohort]:
    """Returns the cohorts of up to ``n`` rounds: before one of nobody, as memory and time allow."""
    cohorts: list[Cohort] = []
    server = sum(value.nbytes for value in run.server.values())
    row = sum(math.prod(shape) for shape in run.clients.shapes.values()) * run.server.w.element_size()
    memory = MEMORY
    room = CHUNK // ((run.data.batch_size or 1) * run.data.sample_bytes(run.dtype))  # in minibatches
    clock, time_s = run.timing and run.timing.clock, run.metrics.get("clock/time_s", 0.0)
    for t in range(run.rounds_done, run.rounds_done + n):
        cohort = Cohort.draw(run, t)
        room -= len(cohort.clients) * max(cohort.attendance.steps.values(), default=0)
        memory -= server + row * len(cohort.clients)
        if room < 0 or memory < 0 or not all(cohort.shares):
            break
        cohorts.append(cohort)
        if clock and (time_s := time_s + (clock.server_s + (cohort.attendance.seconds or 0.0))) >= clock.max_time_s:
            break
    return cohorts


def _train(run: Run, server: State, cohorts: Sequence[Cohort]) -> tuple[list[Trained], dict[int, State]]:
    """Trains the cohorts one after another, from a state of the server on.

    Returns:
        The results before the first one that is not finite, and the states of their clients, by id.
    """
    engine, store = run.engine, run.clients
    assert isinstance(engine, BatchedEngine)
    if run.rounds is None or run.rounds.engine is not engine:
        run.rounds = rounds_of(engine, store.w0, run.seed, run.fabric)
    run.rounds.agreed = False
    drawn = [Drawn(cohort.clients, cohort.contexts, cohort.attendance.receivers, cohort.shares) for cohort in cohorts]
    while drawn:
        mine = [round.share(run.fabric.global_rank) for round in drawn]
        clients, contexts = (
            [value for round in mine for value in getattr(round, name)] for name in ("clients", "contexts")
        )
        minibatches, states = run.minibatch_table(clients, contexts), _rows(run, cohorts[: len(drawn)])
        table = Table(states, store.inits, store.w0)
        with engine.checked():
            results = [*run.rounds.train(drawn, minibatches, server, table)]
        # the only time that the rounds wait for local training
        read = torch.cat([result.numbers for result in results]).cpu()
        columns = torch.split(read, [len(result.numbers) for result in results])
        finite = [*takewhile(lambda numbers: float(numbers[0]) == 0, columns)]
        if len(finite) == len(results):
            rows = table.rows([k for k in states if store.owns(k)])
            return [replace(result, numbers=numbers) for result, numbers in zip(results, finite, strict=True)], rows
        drawn = drawn[: len(finite)]  # once more, for the rows before the first round that is not finite
    return [], {}


def _rows(run: Run, cohorts: Sequence[Cohort]) -> dict[int, State | None]:
    """Returns the states of the clients of some rounds, by id; None before first contact.

    A state that another process keeps is the client's only if this process is the first to train it.
    """
    store = run.clients
    rows = {k: store.row(k) for cohort in cohorts for k in cohort.clients}
    if not store.shared:
        return rows
    unknown = State.initial(store.inits, store.w0, store.w0)
    contacted = collectives.all_gather_dict(
        run.fabric, {k: row is not None for k, row in rows.items() if store.owns(k)}
    )
    known = {k: rows[k] or unknown for k in rows if contacted[k]}
    trainers = {k: rank for cohort in reversed(cohorts) for k, rank in cohort.trainers.items()}
    moves = {k: pair for k in known if (pair := (collectives.owner(k, store.processes), trainers[k]))[0] != pair[1]}
    received = collectives.exchange(run.fabric, moves, known, store.shapes, store.w0)
    return {k: State(received[k]) if k in received else known.get(k) for k in rows}
