"""The arguments of an algorithm's hooks: named vectors, random numbers, contexts, and averages of the uploads."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from fl_lightning.core.errors import NoStateError, UserError, ensure
from fl_lightning.core.flat import FlatSpec, is_finite, to_device
from fl_lightning.core.rng import generator

Weighting: TypeAlias = Literal["samples", "uniform"]

Init: TypeAlias = str | float | Callable[[Tensor], Tensor]
"""Initial value: ``"zeros"``, ``"w0"`` (the initial model) or ``"w"`` (the model of the first contact) for a vector
``(d,)``; a number for a scalar ``(1,)``; a function of the initial model for anything else. What a client keeps has the
dtype of the weights."""


Upload: TypeAlias = dict[str, Tensor]
"""One client's upload, by name."""


def without_gradients(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns values that a hook has made, cut from what it has differentiated."""
    return {name: v.detach() if getattr(v, "requires_grad", False) else v for name, v in values.items()}


class State(Mapping[str, Tensor]):
    """Named tensors, read as attributes (``client.lam``) and never changed in place: ``replace`` returns a new one."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values: dict[str, Tensor]
        self.__dict__["_values"] = dict(values)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        """Returns the names with their shapes."""
        return f"State({', '.join(f'{name}: {tuple(v.shape)}' for name, v in self._values.items())})"

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._values:
            known = ", ".join(self.__dict__.get("_values", ()))
            raise NoStateError(f"no state '{name}' here; there are: {known}; declare what is kept, sent or uploaded")
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise NoStateError(f"state '{name}' is set in place; return the state that replace({name}=...) gives")

    def replace(self, **new: Tensor) -> "State":
        """Returns a copy with other values for some names; no gradient flows through them.

        Raises:
            AttributeError: If a name is not declared.
        """
        for name in new.keys() - self._values.keys():
            getattr(self, name)
        return State({**self._values, **without_gradients(new)})

    def __or__(self, more: Mapping[str, Tensor]) -> "State":
        """Returns a copy with further names, or other values for the same names."""
        return State({**self._values, **more})

    def only(self, names: Iterable[str]) -> "State":
        """Returns the state with these names only."""
        return State({name: getattr(self, name) for name in names})

    def finite(self) -> Tensor:
        """Returns whether every value is finite, as a tensor: the host waits for a GPU only when it reads it."""
        flags = [is_finite(v).all() for v in self._values.values()]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    @classmethod
    def initial(cls, inits: Mapping[str, Init], w0: Tensor, w: Tensor) -> "State":
        """Returns the initial state; see `Init`.

        Args:
            inits: Initial values by name.
            w0: The initial model, ``(d,)``; for several clients at once ``(clients, d)``.
            w: The received model, of the same shape.

        Raises:
            UserError: If an initial value is an unknown word.
        """

        def value(name: str, init: Init) -> Tensor:
            match init:
                case "zeros":
                    return torch.zeros_like(w0)
                case "w0":
                    return w0.clone()
                case "w":
                    return w.clone()
                case int() | float():
                    return w0.new_full((*w0.shape[:-1], 1), init)
                case Callable():
                    return init(w0) if w0.ndim == 1 else vmap(init)(w0)
                case _:
                    raise UserError(f"state '{name}' = {init!r}: give 'zeros', 'w0', 'w', a number or a function of w0")

        return cls({name: value(name, init) for name, init in inits.items()})


class Draws:
    """Random numbers of one client's hooks, or of several clients' at once.

    Each client has a stream of its own for each moment of its local training: before the first step, in each step, and
    after the last. So what a hook draws does not depend on the engine, the number of processes or an interruption.

    Args:
        keys: Seed, round, phase and id of each client.
        device: Device of the numbers; they are drawn on the CPU.
        together: Whether a draw returns a row for each client, ``(clients, k)``; otherwise ``(k,)``.
        refused: Why nothing can be drawn now, as an error message.
    """

    START, END, STEPS = 0, 1, 2

    def __init__(
        self, keys: Sequence[tuple[int, ...]], device: torch.device, together: bool, refused: str = ""
    ) -> None:
        self.keys, self.device, self.together, self.refused = keys, device, together, refused
        self.move_to(self.START)

    def move_to(self, moment: int) -> None:
        """Goes to a moment: START, END, or STEPS plus the number of the step, from 0."""
        self._moment, self._generators = moment, dict[str, list[torch.Generator]]()

    def next_step(self) -> None:
        """Goes to the next step; from START to the first."""
        self.move_to(max(self._moment + 1, self.STEPS))

    def __call__(self, function: Callable[[torch.Generator], Tensor], purpose: str = "hooks") -> Tensor:
        """Returns what a function draws from the stream of each client; see `ClientContext.draw`."""
        ensure(not self.refused, self.refused)
        if purpose not in self._generators:
            self._generators[purpose] = [generator(seed, purpose, *key, self._moment) for seed, *key in self.keys]
        drawn = [function(stream) for stream in self._generators[purpose]]
        return (torch.stack(drawn) if self.together else drawn[0]).to(self.device)


@dataclass(eq=False)
class Logs:
    """Numbers that hooks log.

    Attributes:
        names: Their names.
        values: Those logged so far.
    """

    names: tuple[str, ...] = ()
    values: dict[str, Tensor] = field(default_factory=dict)

    def row(self, name: str, n: int, like: Tensor) -> Tensor:
        """Returns a number of each of ``n`` clients, ``(n,)``, of the dtype of ``like``; NaN: it was not logged."""
        value = self.values.get(name)
        return like.new_full((n,), math.nan) if value is None else value.reshape(-1)[:n].to(like).expand(n)

    @staticmethod
    def means(names: Iterable[str], rows: Sequence[Tensor], server: Sequence[float]) -> dict[str, float]:
        """Returns what is logged in a round: numbers of the server, else means over the clients; NaN are none.

        Args:
            names: Their names.
            rows: The clients' numbers, ``(clients,)`` each, on the CPU.
            server: The server's.
        """
        logged = {
            name: float(row.nanmean()) if math.isnan(number) else number
            for name, row, number in zip(names, rows, server, strict=True)
        }
        return {f"algorithm/{name}": value for name, value in logged.items() if not math.isnan(value)}


@dataclass(frozen=True)
class RoundContext:
    """The context of a round.

    Attributes:
        t: Round, counted from 0.
        rounds: Number of rounds of the run, T.
        m: Number of clients, M; that of this round's cohort is ``uploads.n``.
        flat: Layout of the weight vector.
        phase: Phase of the round, counted from 0.
        logs: The numbers that `log` takes; None where there are none.
    """

    t: int
    rounds: int
    m: int
    flat: FlatSpec
    phase: int = 0
    logs: Logs | None = None

    def log(self, name: str, value: Tensor | float) -> None:
        """Logs a number of the round as ``algorithm/<name>``; of clients the mean, of a phase the last one.

        Args:
            name: Its name, one of ``logs`` of the algorithm or the part.
            value: The number: of one client or the server one value, of several clients ``(clients, 1)``, as a norm
                over the last axis with keepdim.

        Raises:
            UserError: If it is not declared, or if this is neither `local_end` nor the server's step.
        """
        ensure(self.logs is not None, f"ctx.log: '{name}' is logged elsewhere than in local_end and server_step")
        assert self.logs is not None
        ensure(name in self.logs.names, f"ctx.log: declare '{name}' in logs, as logs = ('{name}',)")
        self.logs.values[name] = torch.as_tensor(value)


@dataclass(frozen=True)
class ClientContext(RoundContext):
    """The context of a client; for several clients at once, attributes that differ between them are ``(clients, 1)``.

    Attributes:
        lr: Learning rate of this round's local steps.
        K: Number of local steps.
        K_missed: Number of further steps that were asked of a client that is late; it has no time for them.
        k_lr: Sum of the learning rates of the K steps.
        n_k: Number of samples.
        n_mean: Mean number of samples of all M clients.
        class_counts: Number of samples of each class, ``(..., classes)``, for an objective with ``uses_class_counts``.
        draws: The random numbers that `draw` returns.
        drawn: The cohort that the client was drawn with, if the server has no rounds; its draws are keyed by it.
    """

    lr: float = 0.0
    K: int = 0
    K_missed: int = 0
    k_lr: float = 0.0
    n_k: int = 1
    n_mean: float = 1.0
    class_counts: Tensor | None = None
    draws: Draws | None = None
    drawn: int | None = None

    @property
    def stream(self) -> int:
        """The number that keys what a client draws: the round, or the cohort that it was drawn with."""
        return self.t if self.drawn is None else self.drawn

    def draw(self, function: Callable[[torch.Generator], Tensor], purpose: str = "hooks") -> Tensor:
        """Draws random numbers for each client from a stream of its own: the only source of randomness in hooks.

        The numbers are the same on every engine, with any number of processes, and after a resume. Numbers from torch's
        global generator would depend on the engine: the sequential engine seeds that for each client, since the net may
        draw from it, and the batched engines refuse a hook that does.

        Args:
            function: A function of a generator, on the CPU, to a tensor ``(k,)``, such as
                ``lambda g: torch.randperm(d, generator=g)``; for one number ``lambda g: torch.rand(1, generator=g)``.
            purpose: What the numbers are for: a part has a stream of its own, and so shifts no other draw.

        Returns:
            The numbers, ``(..., k)``.

        Raises:
            UserError: If nothing can be drawn here: on the server, in centralized training, and in the local steps of
                the graphed engine.
        """
        if self.draws is None:
            raise UserError("ctx.draw: only the hooks of a client in federated training draw random numbers")
        return self.draws(function, purpose)

    def randn_like(self, v: Tensor) -> Tensor:
        """Draws standard normal numbers of the dtype and length of ``v``, ``(..., k)``; see `draw`."""
        return self.draw(lambda generator: torch.randn(v.shape[-1], generator=generator, dtype=v.dtype))

    def rand_like(self, v: Tensor) -> Tensor:
        """Draws uniform numbers in [0, 1) of the dtype and length of ``v``, ``(..., k)``; see `draw`."""
        return self.draw(lambda generator: torch.rand(v.shape[-1], generator=generator, dtype=v.dtype))


def k_lr_sums(clients: Sequence[ClientContext]) -> list[list[float]]:
    """Returns the sum of the clients' ``k_lr``, plain and weighted by samples, ``(2, 1)``."""
    return [[sum(c.k_lr for c in clients)], [sum(c.k_lr * c.n_k for c in clients)]]


class Uploads:
    """Averages of a cohort's uploads, which are all that the server sees of them, and of ``k_lr`` of the contexts.

    Args:
        names: Uploaded names.
        weighting: Weights of `weighted`.
        clients: Contexts of the clients whose uploads are added.
        like: A tensor on the device of the uploads, with the dtype in which they are added.

    Attributes:
        n: Number of clients in the averages, S.
        samples: Number of their samples.
        names: Uploaded names.
        share: Called with the sums, and the name and kind of one that is read, until it has added to that one, in
            place, what other processes have; returns name and kind of the one to which it has. None: all are complete.
    """

    share: Callable[[Mapping[str, Tensor], str, int], tuple[str, int]] | None = None

    def __init__(
        self, names: Iterable[str], weighting: Weighting, clients: Sequence[ClientContext], like: Tensor
    ) -> None:
        self.names, self.weighting, self._dtype = tuple(names), weighting, like.dtype
        self.n: float = len(clients)
        self.samples: float | Tensor = sum(c.n_k for c in clients)
        k_lr = to_device(k_lr_sums(clients), like.device, like.dtype)
        self._sums: dict[str, Any] = {"k_lr": k_lr}  # ``(2, ...)`` or pairs, plain and weighted by samples
        self._shared = {("k_lr", 0), ("k_lr", 1)}

    def add(self, upload: Mapping[str, Tensor], samples: int) -> None:
        """Adds one client's upload; in cohort order, so that sums do not depend on which process trained it."""
        for name in self.names:
            value = upload[name].to(self._dtype)
            if name not in self._sums:
                self._sums[name] = torch.stack([value, value * samples])
            else:
                plain, weighted = self._sums[name]
                plain.add_(value)
                weighted.add_(value, alpha=samples)

    @classmethod
    def of_rows(
        cls,
        weighting: Weighting,
        rows: Mapping[str, Tensor],
        counts: Tensor,
        n: Any,
        samples: Tensor,
        k_lr: Tensor,
    ) -> "Uploads":
        """Returns the averages of all uploads of a cohort, as a function of tensors, to the bits of `add` on the CPU.

        Args:
            weighting: Weights of `weighted`.
            rows: The uploads by name, ``(clients, ...)``, 0 for padding.
            counts: Number of samples of each client, ``(clients, 1)``, 0 for padding.
            n: Number of clients without padding, an integer or a scalar tensor.
            samples: The sum of their samples, a scalar tensor.
            k_lr: What `k_lr_sums` returns, ``(2, 1)``.
        """
        uploads = cls(rows, weighting, [], k_lr)
        uploads.n, uploads.samples, uploads._sums["k_lr"] = n, samples, k_lr
        for name, values in rows.items():
            first, *others = zip(values.to(uploads._dtype).unbind(), counts.unbind(), strict=True)
            plain, weighted = first[0], first[0] * first[1]
            for row, count in others:
                plain, weighted = plain + row, torch.addcmul(weighted, row, count)
            uploads._sums[name] = plain, weighted
        return uploads

    def change(self, function: Callable[[str, Tensor | None], Tensor]) -> None:
        """Replaces the sums ``(2, ...)``, plain and weighted by samples, of each name (None: nothing was added)."""
        self._sums |= {name: function(name, self._sums.get(name)) for name in self.names}

    def mean(self, name: str) -> Tensor:
        """Returns the plain mean over the cohort: for duals, variates, perturbations and distances."""
        return self._sum(name, 0) / self.n

    def weighted(self, name: str) -> Tensor:
        """Returns the mean by ``weighting`` (samples or uniform): for models and pseudo-gradients."""
        return self.mean(name) if self.weighting == "uniform" else self._sum(name, 1) / self.samples

    def _sum(self, name: str, kind: int) -> Tensor:
        """Returns a sum, plain (0) or weighted by samples (1)."""
        while self.share is not None and (name, kind) not in self._shared:
            self._shared.add(self.share(self._sums, name, kind))
        if name not in self._sums:
            raise NoStateError(f"no upload '{name}' here; there are: {', '.join(self.names)}; declare it in up")
        total: Tensor = self._sums[name][kind]
        return total
