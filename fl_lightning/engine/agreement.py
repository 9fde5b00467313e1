"""The check that an engine gives what the sequential one gives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl_lightning.core import State, UserError, accumulator_dtype
from fl_lightning.engine.base import Engine, Job, LocalResult

T = TypeVar("T")
CLIENTS, STEPS = 4, 2
"""How many clients the check trains at most, and for how many steps."""
ROUNDING, TOLERANCE = 1e-13, 1e-6
"""In float64: relative change of the weights whose effect is taken for rounding's, and tolerated share of a change."""
COARSE_ROUNDING, COARSE_TOLERANCE = 1e-6, 0.1
"""The same in the precision of the run."""

VALUES = {
    *(torch.equal, torch.allclose, torch.is_nonzero, Tensor.equal, Tensor.allclose, Tensor.is_nonzero),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
    *(Tensor.__index__, Tensor.__contains__),
}
"""Functions that return values of tensors to Python."""


def check(engine: Engine, sequential: Engine, jobs: Sequence[Job]) -> None:
    """Compares two steps of a few unlike clients, and all that leaves their training, with the sequential engine's.

    Both engines train in float64 and without autocast, where they agree to rounding, so that the comparison holds at
    any learning rate. Where rounding is amplified (the sign of a gradient that is zero, a kink of ReLU), more is
    tolerated: ten times what a change of the weights by rounding makes. A net or a device that cannot run in float64 is
    compared in the run's precision. Hooks may not look at values of tensors, and must give the same when they are
    repeated. The check cannot see what a hook does only in later rounds, or from the third step on.

    It holds the results of these clients twice in float64, and those of no others.

    Args:
        engine: The engine; the check changes neither it nor its objective.
        sequential: The sequential engine of the same objective.
        jobs: One process's share of a cohort.

    Raises:
        UserError: If the hooks give different results for several clients at once and for each.
    """
    jobs = unlike(jobs)
    try:
        _compare(engine, sequential, jobs, precise=accumulator_dtype(sequential.net.device) == torch.float64)
    except _NotPrecise:
        _compare(engine, sequential, jobs, precise=False)


def head(job: Job, steps: int) -> Job:
    """Returns a job with its first few steps."""
    K = min(steps, len(job.minibatches))
    return replace(job, minibatches=job.minibatches.take(range(K)), ctx=replace(job.ctx, K=K))


def unlike(jobs: Sequence[Job]) -> list[Job]:
    """Returns a few jobs of two steps, one of them of one step, with as different sizes as there are."""
    order = sorted(range(len(jobs)), key=lambda i: (len(jobs[i].minibatches), jobs[i].ctx.n_k))
    chosen = {order[round(i * (len(order) - 1) / (CLIENTS - 1))] for i in range(CLIENTS)}
    return [head(jobs[i], STEPS if i != order[0] or len(jobs) == 1 else 1) for i in sorted(chosen)]


class _NotPrecise(Exception):
    """The net does not run in float64."""


def _compare(engine: Engine, sequential: Engine, jobs: Sequence[Job], precise: bool) -> None:
    rounding, tolerance = (ROUNDING, TOLERANCE) if precise else (COARSE_ROUNDING, COARSE_TOLERANCE)
    with ExitStack() as stack:
        if precise:
            engine, sequential = engine.without_autocast(), sequential.without_autocast()
            stack.enter_context(_float64(sequential))
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
        expected = [_expected(engine, sequential, job, rounding, tolerance) for job in jobs]
        try:
            found = [*_watched(engine).train(jobs)]
        except UserError:
            raise
        except Exception as error:  # what runs for one client fails for several
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise _refused(engine, f"cannot be batched ({reason:.100}); use sequential") from None
    for one, result in zip(expected, found, strict=True):
        several = _leaving(result)
        for what, (value, limit) in one.items():
            if several[what].shape != value.shape or not float((several[what] - value).norm()) <= limit:
                raise _refused(
                    engine,
                    f"gives for several clients at once (vectors of shape (clients, d)) something else than for each, "
                    f"in {what}; reduce over the last axis only, with keepdim, or use sequential",
                )


def _expected(
    engine: Engine, sequential: Engine, job: Job, rounding: float, tolerance: float
) -> dict[str, tuple[Tensor, float]]:
    """Returns the sequential engine's values of one client, each with the largest tolerated distance from it.

    Raises:
        UserError: If a repetition gives other values.
    """
    one, nearby, again = (next(iter(sequential.train([each]))) for each in (job, _moved(job, rounding), job))
    expected = dict[str, tuple[Tensor, float]]()
    if not one.finite:
        return expected
    known = [*job.received.values(), *job.state.values()]
    near, repeated = _leaving(nearby), _leaving(again)
    for what, value in _leaving(one).items():
        scale = min(float((value - v).norm()) for v in (value * 0, *known) if v.shape == value.shape)
        limit = tolerance * scale
        if not float((repeated[what] - value).norm()) <= limit:
            raise _refused(
                engine,
                f"gives another result when it is repeated, in {what}: a hook draws random numbers elsewhere than "
                "from ctx, changes a tensor in place, or keeps something on self; mend that, or use sequential",
            )
        expected[what] = value, limit + 10 * float((near[what] - value).norm())
    return expected


def _refused(engine: Engine, why: str) -> UserError:
    return UserError(f"trainer.engine = {engine.name}: {type(engine.objective).__name__} {why}")


def _leaving(result: LocalResult) -> dict[str, Tensor]:
    """Returns all that leaves a local training."""
    uploads = {f"upload '{name}'": value for name, value in result.upload.items()}
    state = {f"state '{name}'": value for name, value in result.state.items()}
    return {"the weights": result.w, **uploads, **state, "the loss": result.loss}


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
    return State({name: value.double() for name, value in state.items()})


def _moved(job: Job, by: float) -> Job:
    """Returns a job in which each weight that was received is changed by a fraction ``by`` at most."""
    w = job.received.w
    factor = 1 + by * torch.arange(len(w), device=w.device).cos().to(w)
    return replace(job, received=job.received.replace(w=w * factor))


@contextmanager
def _float64(engine: Engine) -> Iterator[None]:
    """Holds the constants of an engine's objective in float64 for a while."""
    w = engine.net.w
    constants = [p for p in engine.objective.parameters() if not p.requires_grad]
    kept = [(t, t.data) for t in (*constants, *engine.objective.buffers()) if t.is_floating_point()]
    try:
        for tensor, data in kept:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        engine.net.move_to(w)


class _NoValues(TorchFunctionMode):
    """Refuses Python code that depends on values of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUES:
            raise RuntimeError("Python code depends on values of tensors, as if, float() and item() do")
        return func(*args, **(kwargs or {}))


def _watched(engine: Engine) -> Engine:
    """Returns an engine whose hooks may not look at values."""
    watched: Any = copy(engine)

    def watch(function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any) -> T:
            with _NoValues():
                return function(*args)

        return call

    for name in ("begin", "step", "finish"):
        setattr(watched, name, watch(getattr(watched, name)))
    return watched  # type: ignore[no-any-return]
