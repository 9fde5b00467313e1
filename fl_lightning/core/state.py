"""What the hooks of an algorithm are handed: named vectors, the context of a round, and the averages of the uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fl_lightning.core.flat import FlatSpec, is_finite

Weighting: TypeAlias = Literal["samples", "uniform"]

Init: TypeAlias = str | float | Callable[[Tensor], Tensor]
"""First value of a slot: ``"zeros"``, ``"w0"`` (initial model) or ``"w"`` (model received at first contact) for a
vector ``(d,)``; a number for a scalar ``(1,)``; a function of the initial model for anything else."""


Upload: TypeAlias = dict[str, Tensor]
"""What one client uploads, by name."""


class State(Mapping[str, Tensor]):
    """Named tensors, read as attributes (``client.lam``) and never changed in place: ``replace`` makes a new one."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no state '{name}' here; there are: {', '.join(self.__dict__.get('_values', ()))}")
        return self._values[name]

    def replace(self, **new: Tensor) -> State:
        """A copy with some values exchanged.

        Raises:
            AttributeError: If a name is not a declared slot.
        """
        for name in new.keys() - self._values.keys():
            getattr(self, name)
        return State({**self._values, **new})

    def __or__(self, more: Mapping[str, Tensor]) -> State:
        """A copy with further entries, or other values for those that it has."""
        return State({**self._values, **more})

    def only(self, names: Iterable[str]) -> State:
        """The slots of these names alone: what goes over the wire."""
        return State({name: getattr(self, name) for name in names})

    def finite(self) -> bool:
        """Whether every value is finite."""
        return all(bool(is_finite(v)) for v in self._values.values())

    @classmethod
    def initial(cls, rules: Mapping[str, Init], w0: Tensor, w: Tensor) -> State:
        """First values by rule; see `Init`.

        Raises:
            ValueError: If a rule is an unknown word.
        """

        def value(name: str, rule: Init) -> Tensor:
            match rule:
                case "zeros":
                    return torch.zeros_like(w0)
                case "w0":
                    return w0.clone()
                case "w":
                    return w.clone()
                case str():
                    raise ValueError(f"slot '{name}': first value '{rule}' is none of 'zeros', 'w0', 'w' or a number")
                case int() | float():
                    return w0.new_full((1,), rule)
                case _:
                    return rule(w0)

        return cls({name: value(name, rule) for name, rule in rules.items()})


@dataclass(frozen=True)
class RoundContext:
    """Where a round stands.

    Attributes:
        t: Round, from 0.
        rounds: Number of rounds of the whole run, T.
        m: Number of clients, M (not of this round's cohort: that is ``uploads.n``).
        flat: Layout of the weight vector.
        phase: Number of this phase within the round, from 0.
    """

    t: int
    rounds: int
    m: int
    flat: FlatSpec
    phase: int = 0


@dataclass(frozen=True)
class ClientContext(RoundContext):
    """The same on a client; of several clients at once, what differs between them is ``(clients, 1)``.

    Attributes:
        lr: Learning rate of this round's local steps.
        K: Number of local steps.
        k_lr: Sum of the steps' learning rates.
        n_k: Number of samples.
        n_mean: Mean number of samples of all M clients.
    """

    lr: float = 0.0
    K: int = 0
    k_lr: float = 0.0
    n_k: int = 1
    n_mean: float = 1.0


class Uploads:
    """Averages of what a cohort sent; all that the server sees. ``k_lr`` of the contexts is one of them.

    Args:
        names: What is sent.
        weighting: What `weighted` does.
        clients: Contexts of those whose uploads will be added.
        like: A tensor of the uploads' dtype and device.

    Attributes:
        n: Number of clients in the averages, S.
        samples: Their samples.
        names: What is sent.
    """

    def __init__(
        self, names: Iterable[str], weighting: Weighting, clients: Sequence[ClientContext], like: Tensor
    ) -> None:
        self.names, self.weighting = tuple(names), weighting
        self.n, self.samples = len(clients), sum(c.n_k for c in clients)
        k_lr = [[sum(c.k_lr for c in clients)], [sum(c.k_lr * c.n_k for c in clients)]]
        self._sums = {"k_lr": like.new_tensor(k_lr)}

    def add(self, upload: Mapping[str, Tensor], samples: int) -> None:
        """Add one client's upload; in cohort order, so that sums do not depend on who trained whom."""
        for name in self.names:
            if name not in self._sums:
                self._sums[name] = torch.stack([upload[name], upload[name] * samples])
            else:
                plain, weighted = self._sums[name]
                plain.add_(upload[name])
                weighted.add_(upload[name], alpha=samples)

    def change(self, function: Callable[[str, Tensor | None], Tensor]) -> None:
        """Exchange the sums ``(2, ...)``, plain and weighted by samples, of each name (None: nothing was added)."""
        self._sums |= {name: function(name, self._sums.get(name)) for name in self.names}

    def mean(self, name: str) -> Tensor:
        """Plain mean over the cohort: for duals, variates, perturbations and distances."""
        return self._sums[name][0] / self.n

    def weighted(self, name: str) -> Tensor:
        """Mean that follows ``weighting`` (by samples, or uniform): for models and pseudo-gradients."""
        return self.mean(name) if self.weighting == "uniform" else self._sums[name][1] / self.samples
