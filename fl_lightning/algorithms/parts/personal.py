"""Parameters that stay with each client."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from fnmatch import fnmatchcase as fnmatch
from functools import cache

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, FlatSpec, State, Upload, Uploads, ensure, matching

KEY = "model.parts: Personal.keep"
TYPE = "type:"


class Personal(Part):
    """Some parameters stay with each client: they are neither sent nor averaged, and train as without a federation.

    A client starts from its own values of them, at first contact from the initial ones. Whatever an algorithm compares
    with the server (proximal terms, duals, variates, momenta) is 0 there, and its models, such as teachers, have the
    client's own values. The server's model keeps the initial values.

    Args:
        keep: Names of the parameters that stay, with ``*``, ``?`` and ``[...]`` as in a shell (``head.*``), or types of
            modules, all of whose parameters stay (``type:BatchNorm*``); none: the algorithm as it is.

    Raises:
        UserError: If a name matches no parameter, or all but one weight stay.
    """

    def __init__(self, keep: list[str]) -> None:
        self.keep = keep

    def bind(self, flat: FlatSpec) -> Part:
        """Returns a part for this layout; one that does nothing if no parameter stays."""
        types = [pattern.removeprefix(TYPE) for pattern in self.keep if pattern.startswith(TYPE)]
        named = [pattern for pattern in self.keep if not pattern.startswith(TYPE)]
        names = {name for name, kind in zip(flat.names, flat.types, strict=True) if any(fnmatch(kind, t) for t in types)}
        names |= {*matching(flat.names, named, KEY)} if named else set()
        if not names:
            return Part()
        bound = copy(self)
        bound._kept = lambda device: flat.mask(names, device)
        bound._places = cache(lambda device, own: (bound._kept(device) == own).nonzero().flatten())
        cpu = torch.device("cpu")
        bound._sizes = flat.d, len(bound._places(cpu, False))
        ensure(bound._sizes[1] != 1, f"{KEY} = {self.keep}: only one weight is shared; share several, or none")
        bound.client_state = {"own": lambda w0: w0[bound._places(w0.device, True)]}
        return bound

    def client_model(self, w: Tensor, client: State) -> Tensor:
        places = self._places(w.device, True)
        return w.expand(*client.own.shape[:-1], -1).index_copy(-1, places, client.own)

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """The client's own values take the place of the received ones."""
        return self.client_model(w, client), client

    def seen(self, w: Tensor, client: State, received: State, models: frozenset[str]) -> tuple[State, State]:
        """Models have the running values of what stays, other vectors 0: so all differences are 0 there."""
        kept, none = self._kept(w.device), w.new_zeros(())

        def of(state: State) -> State:
            whole = {name: v for name, v in state.items() if self._is_vector(name, v)}
            return state | {name: torch.where(kept, w if name in models else none, v) for name, v in whole.items()}

        return of(client), of(received)

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """A client keeps its own values."""
        return upload, client.replace(own=w[..., self._places(w.device, True)])

    def encoded(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Only what is shared travels."""
        return {
            name: v[..., self._places(v.device, False)] if self._is_vector(name, v) else v for name, v in values.items()
        }

    def decoded(self, uploads: Uploads, sent: State, models: frozenset[str]) -> Uploads:
        """On the server models have the initial values of what stays, other vectors 0."""
        return Whole(uploads, self._sizes, self._places(sent.w.device, False), sent.w, models)

    def _is_vector(self, name: str, v: Tensor) -> bool:
        """Returns whether a value is one of the model's size; the optimizer's, and the net's buffers, are not meant."""
        return v.shape[-1] == self._sizes[0] and "." not in name and name != "buffers"


class Whole(Uploads):
    """Averages of shared weights, as averages of all.

    Args:
        shared: The averages of what has travelled.
        sizes: Numbers of all weights, and of the shared ones.
        places: Positions of the shared ones.
        w: The model that was sent, ``(d,)``.
        models: Names that are models.
    """

    def __init__(
        self, shared: Uploads, sizes: tuple[int, int], places: Tensor, w: Tensor, models: frozenset[str]
    ) -> None:
        self._shared, self._sizes, self._places, self._w, self._models = shared, sizes, places, w, models
        self.n, self.samples, self.names, self.weighting = shared.n, shared.samples, shared.names, shared.weighting

    def mean(self, name: str) -> Tensor:
        """See `Uploads.mean`."""
        return self._whole(name, self._shared.mean(name))

    def weighted(self, name: str) -> Tensor:
        """See `Uploads.weighted`."""
        return self._whole(name, self._shared.weighted(name))

    def _whole(self, name: str, v: Tensor) -> Tensor:
        if len(v) != self._sizes[1] or name in ("buffers", "k_lr"):
            return v
        like = self._w if name in self._models else torch.zeros_like(self._w)
        return like.index_copy(-1, self._places, v)
