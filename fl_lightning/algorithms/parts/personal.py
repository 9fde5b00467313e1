"""Parameters that stay with each client."""

from collections.abc import Callable, Mapping
from copy import copy
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.ascent import SAM
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import (
    ClientContext,
    FlatSpec,
    NonNegative,
    NonNegativeInt,
    State,
    Upload,
    Uploads,
    ensure,
    matching,
)


class Personal(Part):
    """Some parameters stay with each client: they are neither sent nor averaged, and train as without a federation.

    A client starts from its own values of them, at first contact from the initial ones. Whatever an algorithm compares
    with the server (proximal terms, duals, variates, momenta) is 0 there, and its models, such as teachers, have the
    client's own values. The server's model keeps the initial values.

    Parameters are chosen by their names, with ``*``, ``?`` and ``[...]`` as in a shell (``head.*``); by the type of
    their module (``type:BatchNorm*``); or as those of the last layers of the net (``last:1``). One of several
    modules has a name in each.

    Args:
        keep: The parameters that stay; null: the last layer; none: the algorithm as it is.
        epochs_alone: Epochs in which a client trains what stays alone, before it trains what is shared alone; 0: it
            trains both together.
        perturb: The weights that an ascent with a gradient, such as SAM's, moves: what is shared, what is kept, or all.
            Its radius is that of these weights.
        share: In place of ``keep``, the parameters that do not stay.

    Raises:
        UserError: If both are given, a name matches no parameter, or all but one weight stay.
    """

    has_global_model = False
    _kept: Callable[[torch.device], Tensor]
    _places: Callable[[torch.device, bool], Tensor]
    _sizes: tuple[int, int]

    def __init__(
        self,
        keep: list[str] | None = None,
        epochs_alone: NonNegativeInt = 0,
        perturb: Literal["shared", "kept", "all"] = "shared",
        share: list[str] | None = None,
    ) -> None:
        ensure(keep is None or share is None, "model.parts: Personal: keep and share are both given; give one of them")
        self.keep, self.share = ["last:1"] if keep is None else keep, share
        self.perturb = perturb
        self.epochs_alone, self.trains_alone = epochs_alone, epochs_alone > 0

    def bind(self, flat: FlatSpec) -> Part:
        """Returns a part for this layout; one that does nothing if no parameter stays."""
        shared = None if self.share is None else _chosen(flat, "share", self.share)
        names = _chosen(flat, "keep", self.keep) if shared is None else {*flat.names} - shared
        if not names:
            if self.keep != []:
                warn("model.parts: Personal: no parameter of this net stays with a client", stacklevel=2)
            return Part()
        bound = copy(self)
        bound.shared = [name for name in flat.names if name not in names]
        bound._kept = lambda device: flat.mask(names, device)
        bound._places = cache(lambda device, kept: (bound._kept(device) == kept).nonzero().flatten())
        bound._sizes = flat.d, len(bound._places(torch.device("cpu"), False))
        if not bound.shared and self.keep != ["*"] and self.share != []:
            warn("model.parts: Personal: all parameters stay with a client, so nothing is shared", stacklevel=2)
        ensure(bound._sizes[1] != 1, "model.parts: Personal: only one weight is shared; share several, or none")
        bound.client_state = {"own": lambda w0: w0[bound._places(w0.device, True)]}
        return bound

    def client_model(self, w: Tensor, client: State) -> Tensor:
        places = self._places(w.device, True)
        return w.expand(*client.own.shape[:-1], -1).index_copy(-1, places, client.own)

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """The client's own values take the place of the received ones."""
        return self.client_model(w, client), client

    def seen_state(self, w: Tensor, client: State, received: State, models: frozenset[str]) -> tuple[State, State]:
        """Models have the running values of what stays, other vectors 0: so all differences are 0 there."""
        kept, zero = self._kept(w.device), w.new_zeros(())

        def seen(state: State) -> State:
            vectors = {name: v for name, v in state.items() if self._is_vector(name, v)}
            return state | {name: torch.where(kept, w if name in models else zero, v) for name, v in vectors.items()}

        return seen(client), seen(received)

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """A client keeps its own values."""
        return upload, self.end_alone(w, client)

    def moving(self, w: Tensor, alone: bool) -> Tensor | None:
        """Returns the mask of what stays, of a client that trains alone; afterwards that of what is shared, or None."""
        return (self._kept(w.device) == alone) if alone or self.trains_alone else None

    def perturbed(self, w: Tensor) -> Tensor | None:
        """Returns the mask that ``perturb`` chooses."""
        return None if self.perturb == "all" else self._kept(w.device) == (self.perturb == "kept")

    def end_alone(self, w: Tensor, client: State) -> State:
        """A client keeps its own values."""
        return client.replace(own=w[..., self._places(w.device, True)])

    def encoded(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Only what is shared travels."""
        return {
            name: v[..., self._places(v.device, False)] if self._is_vector(name, v) else v for name, v in values.items()
        }

    def decoded(self, uploads: Uploads, sent: State, models: frozenset[str]) -> Uploads:
        """On the server models have the initial values of what stays, other vectors 0."""
        return Whole(uploads, self._sizes[1], self._places(sent.w.device, False), sent.w, models)

    def _is_vector(self, name: str, v: Tensor) -> bool:
        """Returns whether a value is one of the model's size; the optimizer's, and the net's buffers, are not meant."""
        return v.shape[-1] == self._sizes[0] and "." not in name and name != "buffers"


def _chosen(flat: FlatSpec, key: str, patterns: list[str]) -> set[str]:
    """Returns the names of the parameters that patterns choose; see `Personal`."""
    chosen, layers = set[str](), list(dict.fromkeys(name.rpartition(".")[0] for name in flat.tied))
    for pattern in patterns:
        scheme, _, argument = pattern.rpartition(":")
        setting = f"model.parts: Personal.{key}"
        if scheme == "type":
            chosen |= {name for name, kind in flat.types.items() if fnmatchcase(kind, argument)}
        elif scheme == "last":
            ensure(
                argument.isdecimal() and int(argument) > 0,
                f"{setting} = {pattern}: give a number of layers, such as last:1",
            )
            chosen |= {name for name in flat.tied if name.rpartition(".")[0] in layers[-int(argument) :]}
        else:
            chosen |= {*matching([*flat.tied], [pattern], setting)}
    return {flat.tied[name] for name in chosen}


class Ditto(Part):
    """Ditto (Li et al., ICML 2021): a second model of each client, which the global one pulls.

    Before each round it trains by ``v <- v - lr (g(v) + lam (v - w^t))`` with the round's number of steps and
    minibatches, from the client's last v, at first contact from the initial model. The global model is that of the
    algorithm without this part.

    Args:
        lam: Strength of the pull towards the received model.
        sam: Whether the ascent of the algorithm, SAM or ASAM, also gives the point of the gradient g.

    Raises:
        UserError: If there is no such ascent.
    """

    client_state = {"own": "w0"}
    trains_alone = True

    def __init__(self, lam: NonNegative = 1.0, sam: bool = False) -> None:
        self.lam, self.sam = lam, sam
        self.ascends_alone = sam

    def attach(self, objective: Any) -> None:
        has_one = not self.sam or isinstance(objective.ascent, SAM)
        name = type(objective).__name__
        ensure(has_one, f"model.parts: Ditto.sam = true: {name} has no SAM or ASAM; set model.ascent, or sam to false")

    def client_model(self, w: Tensor, client: State) -> Tensor:
        return client.own

    def direction_alone(self, w: Tensor, g: Tensor, received: State) -> Tensor:
        """``g(v) + lam (v - w^t)``."""
        return g + self.lam * (w - received.w) if self.lam else g

    def end_alone(self, w: Tensor, client: State) -> State:
        """A client keeps its own model."""
        return client.replace(own=w)


class Whole(Uploads):
    """Averages of shared weights, as averages of all.

    Args:
        uploads: The averages of what has travelled.
        size: Number of shared weights.
        places: Their positions.
        w: The model that was sent, ``(d,)``.
        models: Names that are models.
    """

    def __init__(self, uploads: Uploads, size: int, places: Tensor, w: Tensor, models: frozenset[str]) -> None:
        self._uploads, self._size, self._places, self._w, self._models = uploads, size, places, w, models
        self.n, self.samples, self.names, self.weighting = uploads.n, uploads.samples, uploads.names, uploads.weighting

    def mean(self, name: str) -> Tensor:
        """See `Uploads.mean`."""
        return self._whole(name, self._uploads.mean(name))

    def weighted(self, name: str) -> Tensor:
        """See `Uploads.weighted`."""
        return self._whole(name, self._uploads.weighted(name))

    def _whole(self, name: str, v: Tensor) -> Tensor:
        if len(v) != self._size or name in ("buffers", "k_lr"):
            return v
        like = self._w if name in self._models else torch.zeros_like(self._w)
        return like.index_copy(-1, self._places, v)
