"""The check that an engine gives what the sequential one gives."""

from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import State, UserError, WithoutCasts, accumulator_dtype, folded
from fl_lightning.engine.base import Engine, Job, LocalResult
from fl_lightning.engine.record import DEPENDS

Expected = dict[str, tuple[Tensor, float]]
"""What leaves a local training, by name: the value, and the largest tolerated distance from it."""
CLIENTS = 4
"""How many clients the check trains at most."""
ROUNDING, TOLERANCE = 1e-13, 1e-6
"""In float64: relative change of a vector that stands for rounding, and tolerated share of a change."""
COARSE_ROUNDING, COARSE_TOLERANCE = 1e-6, 0.1
"""The same in the precision of the run."""
REPEATED = 1e-4
"""Tolerated share of a change when a step is repeated in the precision of the run."""

VALUES = {
    *(torch.equal, torch.allclose, torch.is_nonzero, Tensor.equal, Tensor.allclose, Tensor.is_nonzero),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
    *(Tensor.__index__, Tensor.__contains__),
}
"""Functions that return values of tensors to Python."""


def check(engine: Engine, sequential: Engine, jobs: Sequence[Job]) -> None:
    """Compares three steps of a few unlike clients, and all that leaves their training, with the sequential engine's.

    The steps are the first, the second and the last one. The engine takes them twice: in the phase of the jobs, and in
    the last phase of the last round, where counters of steps stand as at the end of a local training. So the check sees
    hooks that change once in the run, as after a warm-up; it cannot see what a hook does only in rounds in between, or
    what a local optimizer does only from its fourth step on.

    One of the minibatches is shorter than others, and padded, if that happens in the run: a term over a whole
    minibatch, as of contrastive losses or of BatchNorm without running statistics, must leave out the padding.

    Both engines train in float64, without autocast and without casts of the net's own, where they agree to rounding, so
    that the comparison holds at any learning rate. A value may be the sum of larger ones, as a dual that a step takes
    back, so the rounding of the largest vector of its shape is tolerated. Where rounding is amplified (the sign of a
    gradient that is zero, a kink of ReLU), more is: ten times what a change of the weights by rounding makes. A net or
    a device that cannot run in float64 is compared in the run's precision. Hooks may not look at values of tensors, and
    must give the same when they are repeated.

    In memory the check holds the results of these clients twice, in float64, and no others.

    Args:
        engine: The engine; the check changes neither it nor its objective.
        sequential: The sequential engine of the same objective.
        jobs: One process's share of a cohort; nothing is compared if it is empty.

    Raises:
        UserError: If the hooks give different results for several clients at once and for each.
    """
    if not jobs:
        return
    jobs = with_padding(unlike(jobs))
    try:
        _compare(engine, sequential, jobs, precise=accumulator_dtype(sequential.net.device) == torch.float64)
    except _NotPrecise:
        _compare(engine, sequential, jobs, precise=False)


def check_repeatable(sequential: Engine, jobs: Sequence[Job]) -> None:
    """Warns if the first step of a client, taken twice, has two results, which no resumed run could repeat.

    On a CPU alone: on a GPU the order of sums may differ.

    Args:
        sequential: The sequential engine, which the check does not change.
        jobs: One process's share of a cohort; nothing is checked if it is empty.
    """
    first = next((excerpt(job, [0]) for job in jobs if len(job.minibatches)), None)
    if first is None or sequential.net.device.type != "cpu":
        return
    result, repeated = (next(iter(sequential.train([first]))) for _ in range(2))
    differ = [*_too_far(_with_limits(first, result, 0.0, REPEATED), repeated)] if result.finite else []
    if differ:
        rank_zero_warn(
            f"{type(sequential.objective).__name__} gives another result when a client's step is repeated, in "
            f"{', '.join(differ)}: net, loss, data or a hook draws random numbers elsewhere than from torch, or keeps "
            "something; so does a resumed run",
            stacklevel=2,
        )


def unlike(jobs: Sequence[Job]) -> list[Job]:
    """Returns a few jobs with as different sizes as there are, and of each the first, the second and the last step.

    Of the smallest job it is the last step alone, so that the others take steps that this one does not.
    """
    order = sorted(jobs, key=lambda job: (len(job.minibatches), job.ctx.n_k))
    chosen = [order[i] for i in sorted({round(i * (len(order) - 1) / (CLIENTS - 1)) for i in range(CLIENTS)})]
    last = [len(job.minibatches) - 1 for job in chosen]
    steps = [sorted({0, min(1, n), n}) for n in last]
    if len(chosen) > 1:
        steps[0] = last[:1]
    return [*map(excerpt, chosen, steps)]


def with_padding(jobs: Sequence[Job]) -> list[Job]:
    """Returns jobs of which one has a short last minibatch, if theirs have one size, and the run's have several."""
    sizes = {size for job in jobs for size in job.minibatches.sizes}
    others = jobs[0].minibatches.source.minibatch_sizes() - sizes
    if len(sizes) != 1 or not others:
        return [*jobs]
    size = max(sizes)
    fewer = size - max((n for n in others if n < size), default=max(1, size - 1))
    last = jobs[-1].minibatches
    short = replace(
        last,
        indices=last.indices[: len(last.indices) - fewer],
        sizes=[*last.sizes[:-1], size - fewer],
        draws={name: v[: len(v) - fewer] for name, v in last.draws.items()},
    )
    return [*jobs[:-1], replace(jobs[-1], minibatches=short)]


def excerpt(job: Job, steps: Sequence[int]) -> Job:
    """Returns a job with some of its steps; its client misses the others, as one that is late."""
    ctx = replace(job.ctx, K=len(steps), K_missed=job.ctx.K_missed + job.ctx.K - len(steps))
    return replace(job, minibatches=job.minibatches.take(steps), ctx=ctx)


def at_the_end(job: Job, objective: LocalObjective) -> Job:
    """Returns a job in the last phase of the last round; its counters of steps have counted those that it misses.

    Counters are the scalars that live for a round.
    """
    counters = [name for name, init in objective.scratch_inits().items() if isinstance(init, int | float)]
    state = job.state | {name: job.state[name] + job.ctx.K_missed for name in counters}
    ctx = replace(job.ctx, t=job.ctx.rounds - 1, phase=objective.phases - 1)
    return replace(job, state=state, ctx=ctx)


class _NotPrecise(Exception):
    """The net does not run in float64."""


def _compare(engine: Engine, sequential: Engine, jobs: Sequence[Job], precise: bool) -> None:
    rounding, tolerance = (ROUNDING, TOLERANCE) if precise else (COARSE_ROUNDING, COARSE_TOLERANCE)
    with ExitStack() as stack:
        if precise:
            engine, sequential = engine.without_autocast(), sequential.without_autocast()
            stack.enter_context(_float64(sequential))
            stack.enter_context(WithoutCasts())
            jobs = _converted(jobs)
        try:
            jobs = [
                replace(job, state=job.state | result.state)  # an initial state may be zero and hide much
                for job, result in zip(jobs, sequential.train(jobs), strict=True)
            ]
        except (RuntimeError, TypeError) as error:
            if precise:
                raise _NotPrecise from error
            raise
        watched = _watched(engine)
        for phase_jobs in (jobs, [at_the_end(job, engine.objective) for job in jobs]):
            expected = [_expected(engine, sequential, job, rounding, tolerance) for job in phase_jobs]
            _compare_with(expected, watched, phase_jobs)


def _compare_with(expected: Sequence[Expected], engine: Engine, jobs: Sequence[Job]) -> None:
    """Compares what an engine gives for some jobs with what the sequential engine gives for each."""
    try:
        results = [*engine.train(jobs)]
    except UserError:
        raise
    except Exception as error:  # what runs for one client fails for several
        reason = folded(f"{type(error).__name__}: {error}")
        raise _refused(engine, f"cannot be batched ({reason:.100}); use sequential") from None
    for wanted, result in zip(expected, results, strict=True):
        for name in _too_far(wanted, result):
            raise _refused(
                engine,
                f"gives for several clients at once (vectors of shape (clients, d)) something else than for each, "
                f"in {name}; reduce over the last axis only, with keepdim, leave padding, whose weight is 0, out "
                "of a term over a minibatch (BatchNorm without running statistics cannot), or use sequential",
            )


def _expected(engine: Engine, sequential: Engine, job: Job, rounding: float, tolerance: float) -> Expected:
    """Returns the sequential engine's values of one client, each with the largest tolerated distance from it.

    Raises:
        UserError: If a repetition gives other values.
    """
    result, nearby, repeated = (next(iter(sequential.train([case]))) for case in (job, _moved(job, rounding), job))
    if not result.finite:
        return {}
    expected, near = _with_limits(job, result, rounding, tolerance), _leaving(nearby)
    for name in _too_far(expected, repeated):
        raise _refused(
            engine,
            f"gives another result when it is repeated, in {name}: a hook draws random numbers elsewhere than "
            "from ctx, changes a tensor in place, or keeps something on self; mend that, or use sequential",
        )
    return {name: (v, limit + 10 * float((near[name] - v).norm())) for name, (v, limit) in expected.items()}


def _with_limits(job: Job, result: LocalResult, rounding: float, tolerance: float) -> Expected:
    """Returns what leaves a local training, each value with the distance that rounding explains."""
    known = [*map(_real, (*job.received.values(), *job.state.values()))]
    expected = dict[str, tuple[Tensor, float]]()
    for name, value in _leaving(result).items():
        like = [v for v in (value * 0, *known) if v.shape == value.shape]
        change = min(float((value - v).norm()) for v in like)
        terms = max(float(v.norm()) for v in (value, *like))  # it may be their sum, of which rounding is left
        expected[name] = value, tolerance * change + rounding * terms
    return expected


def _too_far(expected: Expected, result: LocalResult) -> Iterator[str]:
    """Yields what of a result is further from what is expected than tolerated."""
    values = _leaving(result)
    for name, (value, limit) in expected.items():
        if values[name].shape != value.shape or not float((values[name] - value).norm()) <= limit:
            yield name


def _refused(engine: Engine, reason: str) -> UserError:
    return UserError(f"trainer.engine = {engine.name}: {type(engine.objective).__name__} {reason}")


def _leaving(result: LocalResult) -> dict[str, Tensor]:
    """Returns all that leaves a local training, by its name in messages."""
    uploads = {f"upload '{name}'": value for name, value in result.upload.items()}
    state = {f"state '{name}'": value for name, value in result.state.items()}
    logs = {f"log '{name}'": result.logs.row(name, 1, result.loss)[0] for name in result.logs.values}
    values = {"the weights": result.w, **uploads, **state, **logs, "the loss": result.loss}
    return {name: _real(value) for name, value in values.items()}


def _real(value: Tensor) -> Tensor:
    """Returns a mask, integers or half precision as numbers of which norms can be taken."""
    return value if value.dtype in (torch.float32, torch.float64) else value.to(accumulator_dtype(value.device))


def _converted(jobs: Sequence[Job]) -> list[Job]:
    """Returns jobs in float64; jobs that share what they receive still do."""
    received = {id(job.received): _doubled(job.received) for job in jobs}
    return [
        replace(
            job,
            received=received[id(job.received)],
            state=_doubled(job.state),
            minibatches=replace(job.minibatches, dtype=torch.float64),
        )
        for job in jobs
    ]


def _doubled(state: State) -> State:
    return State({name: v.double() if v.is_floating_point() else v for name, v in state.items()})


def _moved(job: Job, fraction: float) -> Job:
    """Returns a job in which each weight that was received is changed by a fraction at most."""
    w = job.received.w
    factor = 1 + fraction * torch.arange(len(w), device=w.device).cos().to(w)
    return replace(job, received=job.received.replace(w=w * factor))


@contextmanager
def _float64(engine: Engine) -> Iterator[None]:
    """Holds the constants of an engine's objective in float64 for a while."""
    constants = [p for p in engine.objective.parameters() if not p.requires_grad]
    with ExitStack() as restored:
        restored.callback(engine.net.move_to, engine.net.w)
        for tensor in (t for t in (*constants, *engine.objective.buffers()) if t.is_floating_point()):
            restored.callback(setattr, tensor, "data", tensor.data)
            tensor.data = tensor.data.double()
        yield


class _NoValues(ContextDecorator, TorchFunctionMode):
    """Refuses Python code that depends on values of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUES:
            raise RuntimeError(DEPENDS)
        return func(*args, **(kwargs or {}))


def _watched(engine: Engine) -> Engine:
    """Returns an engine whose hooks may not look at values."""
    watched: Any = copy(engine)
    for name in ("begin", "step", "finish"):
        setattr(watched, name, _NoValues()(getattr(watched, name)))
    return watched  # type: ignore[no-any-return]
