"""The uploads that arrive in a phase: which are accepted, their averages, what their clients keep, what diverges."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.core import (
    ClientContext,
    DivergenceError,
    FlatSpec,
    RoundContext,
    State,
    Upload,
    Uploads,
    accumulator_dtype,
    ensure,
    is_finite,
    to_device,
)
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.aggregation.base import Received
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives
from fl_lightning.trainer.storage.checkpoint import Norms, norms


class Arrivals:
    """The local results of a cohort, of which each process holds its share. Every process calls all methods.

    Args:
        run: The run.
        cohort: The clients; there may be none.
        results: Those of this process, in the order of its share.
        like: A tensor of the dtype, on this process's device.

    Attributes:
        accepted: Whether each client's upload and state are finite, in cohort order.
        losses: Training loss of each accepted client, ``(accepted,)``, on the CPU.
        logged: The same of each number that hooks log.
        shapes: Shape of each uploaded name.

    Raises:
        UserError: If a client of this process uploads another shape than the others.
    """

    def __init__(self, run: Run, cohort: Cohort, results: Sequence[LocalResult], like: Tensor) -> None:
        self.run, self.cohort, self.results, self.like = run, cohort, results, like
        self.shapes = self._upload_shapes()
        for result in results:
            shapes = {name: list(result.upload[name].shape) for name in self.shapes}
            ensure(
                shapes == self.shapes,  # a shorter one would be repeated in the sum
                f"model = {type(run.objective).__name__}: client {result.client} uploads shapes {shapes}, the first "
                f"client {self.shapes}; return the same shapes for every client",
            )
        names = run.objective.all_logs
        table = torch.zeros(
            2 + len(names), len(cohort.clients), dtype=accumulator_dtype(like.device), device=like.device
        )
        if results:  # is it finite, its loss, and what it logs
            mine = to_device(cohort.shares[run.fabric.global_rank], like.device)
            logged = [[r.logs.row(name, 1, like)[0] for r in results] for name in names]
            columns = ([r.finite for r in results], [r.loss for r in results], *logged)
            table[:, mine] = torch.stack([torch.stack(column).to(table.dtype) for column in columns])
        if cohort.clients:
            collectives.all_reduce_sum(run.fabric, table)
        finite, *rows = table.cpu().unbind()  # the only time that a round waits for local training
        self.losses, *self.logged = [row[finite.bool()] for row in rows]
        self.accepted = [bool(x) for x in finite.tolist()]

    @property
    def refused(self) -> list[int]:
        """Ids of the clients whose upload or state is not finite."""
        return [k for k, accepted in zip(self.cohort.clients, self.accepted, strict=True) if not accepted]

    @property
    def contexts(self) -> dict[int, ClientContext]:
        """Context of each accepted client, by id, in cohort order."""
        clients = zip(self.cohort.clients, self.cohort.contexts, self.accepted, strict=True)
        return {k: ctx for k, ctx, accepted in clients if accepted}

    def rows(self) -> dict[int, State]:
        """Returns the new states of the accepted clients that this process owns, by id."""
        store, refused = self.run.clients, self.refused
        if not store.inits:
            return {}
        new = {r.client: r.state.only(store.inits) for r in self.results if r.client not in refused}
        moves_back = {k: (rank, owner) for k, (owner, rank) in self.cohort.moves.items() if k not in refused}
        received = collectives.exchange(self.run.fabric, moves_back, new, store.shapes, self.like)
        return {k: row for k, row in new.items() if store.owns(k)} | {k: State(row) for k, row in received.items()}

    def reasons(self) -> str:
        """Returns a text that names a value that is not finite, for each of the first refused clients."""
        flat = self.run.objective.flat
        mine = {r.client: culprit({**r.state, **r.upload}, flat) for r in self.results if not r.finite}
        reasons = [f"client {k}: {what}" for k, what in collectives.all_gather_dict(self.run.fabric, mine).items()]
        return "; ".join([*reasons[:3], *["..."] * (len(reasons) > 3)])

    def summed_here(self) -> dict[int, Upload]:
        """Returns the uploads that this process sums, in cohort order: on rank 0 all, or on each process its own."""
        fabric, uploads, accepted = self.run.fabric, {r.client: r.upload for r in self.results}, [*self.contexts]
        if self.run.settings.deterministic and fabric.world_size > 1:
            trainers = self.cohort.trainers
            uploads |= collectives.exchange(
                fabric, {k: (trainers[k], 0) for k in accepted if trainers[k]}, uploads, self.shapes, self.like
            )
            accepted = accepted if fabric.is_global_zero else []
        return {k: uploads[k] for k in accepted if k in uploads}

    def _upload_shapes(self) -> dict[str, list[int]]:
        """Returns the shapes; rank 0, which trains a client of every cohort, broadcasts them once a run."""
        known, phase = self.run.upload_shapes, self.cohort.phase
        if self.cohort.clients and phase not in known:
            shapes = {name: list(v.shape) for name, v in self.results[0].upload.items()} if self.results else {}
            known[phase] = self.run.fabric.broadcast(shapes)
        return known.get(phase, {})


def average(arrivals: Sequence[Arrivals], server: State, known: Mapping[str, Tensor], ctx: RoundContext) -> Uploads:
    """Returns the accepted uploads, combined by the run's rule.

    Args:
        arrivals: Those since the server's last step.
        server: The server's state.
        known: Reference value of each upload, by name; the upload is expected to lie near it.
        ctx: The phase's context.
    """
    run, shapes, like = arrivals[0].run, arrivals[0].shapes, arrivals[0].like
    rule, accepted = run.aggregation, [context for wave in arrivals for context in wave.contexts.values()]
    uploads = rule.uploads(run.objective, accepted, ctx, like)
    pairs = [(wave.contexts[k], upload) for wave in arrivals for k, upload in wave.summed_here().items()]
    if not rule.by_rows or run.fabric.is_global_zero:
        clients, arrived = [context for context, _ in pairs], [upload for _, upload in pairs]
        refused = sum(len(wave.refused) for wave in arrivals)
        rule.fill(uploads, Received(arrived, known, clients, server, ctx, run.seed, refused))
    collectives.reduce(run.fabric, uploads, rule.shapes(shapes, known), like, run.settings.deterministic)
    return uploads


def total_over(
    run: Run, w: Tensor, clients: Iterable[int], rows: Mapping[int, State], function: Callable[[State], Tensor]
) -> Tensor:
    """Returns the sum of a function of the clients' states; every process calls.

    Args:
        run: The run.
        w: The server's model, ``(d,)``.
        clients: Their ids.
        rows: The states of some of them, if newer than what is stored, by id.
        function: The function, to a vector or a scalar ``(1,)``.
    """
    store, known = run.clients, State({"w": w})

    def value(client: State) -> Tensor:
        return function(run.objective.seen_state(w, client, known)[0])

    mine = ((k, value(store.get(k, w, rows.get(k)))) for k in sorted(clients) if store.owns(k))
    zero = torch.zeros_like(value(State.initial(store.inits, store.w0, w)))
    return collectives.sum_of(run.fabric, mine, zero)


def check_finite(run: Run, server: State, t: int) -> None:
    """Checks the server's state after round ``t``, of federated or centralized training.

    Raises:
        DivergenceError: If it is not finite.
    """
    if not server.finite():
        raise diverged(run, t, f"the new global state is not finite ({culprit(server, run.objective.flat)})")


def diverged(run: Run, t: int, what: str) -> DivergenceError:
    """Returns the error of a round without a finite result.

    Args:
        run: The run, in the state before the round.
        t: The round, from 0.
        what: What is not finite.
    """
    remedy = "lower model.optimizer.lr or set model.optimizer.clip"
    if run.kind == "federated":
        remedy += (
            ", find where it begins with trainer.engine = debug, or leave such rounds out with trainer.on_divergence = "
            "continue"
        )
    if not run.objective.lr(run.round_context(t)):
        remedy += (
            "; the learning rate of this round is 0, by which some algorithms divide: give model.averaging.lr_min, or "
            "the floor of model.optimizer.schedule, a value above 0"
        )
    history = growth(run.state.norms or [norms(run.server)])
    return DivergenceError(f"round {t + 1}: {what}, training has diverged; in the last rounds: {history}; {remedy}")


def divergences(run: Run, one_more: bool = False) -> dict[str, float]:
    """Returns how many rounds have been left out, if a run goes on after a divergence."""
    count = run.metrics.get("client/diverged", 0) + one_more
    return {"client/diverged": count} if run.settings.on_divergence == "continue" else {}


def culprit(values: Mapping[str, Tensor], flat: FlatSpec) -> str:
    """Returns the first value that is not finite: its name, and the first parameter of the net where it is not.

    Args:
        values: Tensors by name; at least one is not finite.
        flat: Layout of the tensors that have d numbers.
    """
    name = next(name for name, v in values.items() if not bool(is_finite(v).all()))
    return f"{name}, first in {flat.not_finite(values[name])}" if values[name].shape == (flat.d,) else name


def growth(history: Norms) -> str:
    """Returns the norms of the last rounds as text; the vector that grew most comes first."""
    table = {name: [float(row[name]) for row in history if name in row] for name in history[-1]}

    def factor(name: str) -> float:
        first = next((x for x in table[name] if x), 0.0)
        return table[name][-1] / first if first else 0.0

    order = sorted(table, key=factor, reverse=True)
    return ", ".join(f"‖{name}‖ {' → '.join(f'{x:.3g}' for x in table[name])}" for name in order)
