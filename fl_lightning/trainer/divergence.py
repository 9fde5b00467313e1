"""The error of a round that has no finite result."""

from collections.abc import Mapping

from torch import Tensor

from fl_lightning.core import DivergenceError, FlatSpec, State, is_finite
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.state import Norms, norms


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


def culprit(values: Mapping[str, Tensor], flat: FlatSpec) -> str:
    """Returns the first value that is not finite: its name, and the first parameter of the net where it is not.

    Args:
        values: Tensors by name; at least one is not finite.
        flat: Layout of the tensors that have d numbers.
    """
    name = next(name for name, v in values.items() if not bool(is_finite(v)))
    return f"{name}, first in {flat.not_finite(values[name])}" if values[name].shape == (flat.d,) else name


def growth(history: Norms) -> str:
    """Returns the norms of the last rounds as text; the vector that grew most comes first."""
    table = {name: [float(row[name]) for row in history if name in row] for name in history[-1]}

    def factor(name: str) -> float:
        first = next((x for x in table[name] if x), 0.0)
        return table[name][-1] / first if first else 0.0

    order = sorted(table, key=factor, reverse=True)
    return ", ".join(f"‖{name}‖ {' → '.join(f'{x:.3g}' for x in table[name])}" for name in order)
