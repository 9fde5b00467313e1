"""Copies that hooks get in the first round of a process, so that one that changes tensors in place harms nobody."""

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import State, ensure


class Copies:
    """Copies of states that hooks get, and whether they have been changed in place.

    In place means by ``v -= x``, ``v.mul_(x)`` or ``v[0] = x``: the tensors are the server's, or a client's own.

    Args:
        objective: The objective whose hooks get them.
    """

    def __init__(self, objective: LocalObjective) -> None:
        self.objective, self._given = objective, list[tuple[str, State]]()

    def of(self, name: str, state: State) -> State:
        """Returns a copy of a state, which messages call ``name``."""
        copy = State({of: value.clone() for of, value in state.items()})
        self._given.append((name, copy))
        return copy

    def check(self, when: str) -> None:
        """Checks all copies.

        Args:
            when: When hooks had them.

        Raises:
            UserError: If one has been changed.
        """
        changed = [f"{name}.{of}" for name, state in self._given for of, value in state.items() if value._version]
        ensure(
            not changed,
            f"{type(self.objective).__name__}: a hook changes {', '.join(dict.fromkeys(changed))} in place {when}; "
            "compute a new tensor, as v - x in place of v -= x",
        )
