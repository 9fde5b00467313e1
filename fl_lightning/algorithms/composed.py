"""The parts of an objective as one: what they keep, send and change, and the models that they give to clients."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from fl_lightning.algorithms.hooks import Hooks
from fl_lightning.algorithms.parts import (
    Averaging,
    Buffers,
    Gradient,
    LocalOptimizer,
    Part,
    RelaxedInit,
    ServerUpdate,
    through,
)
from fl_lightning.core import ClientContext, FlatSpec, Init, RoundContext, State, UserError, ensure


class Composed(Hooks):
    """An algorithm with its parts; see `LocalObjective`."""

    config_key: ClassVar[str]
    flat: FlatSpec
    net: nn.Module
    loss: nn.Module
    optimizer: LocalOptimizer
    averaging: Averaging | None
    net_buffers: Buffers | None
    relaxed_init: float
    _began_relaxed: bool | None = None
    parts: Sequence[Part]

    @property
    def all_parts(self) -> list[Part]:
        """The parts of this objective, in the order in which their hooks run."""
        relaxes = self.relaxed_init != 0 if self._began_relaxed is None else self._began_relaxed
        if self.relaxed_init and not relaxes:
            raise UserError(
                f"model.relaxed_init = {self.relaxed_init}: was 0 when the run began, so clients keep no last model; "
                "begin with it, or with a small one"
            )
        relaxed = RelaxedInit(self.relaxed_init, self.adds_updates) if relaxes else None
        slots = (self.ascent, self.server_update, relaxed, self.averaging, self.net_buffers)
        return [*(part for part in slots if part is not None), *self.parts]

    @property
    def _owners(self) -> "tuple[Composed | Part, ...]":
        return self, *self.all_parts

    @property
    def configured(self) -> tuple[object, ...]:
        """This objective, its parts, its optimizer and its loss: what trains, but for the net."""
        return *self._owners, self.optimizer, self.loss

    def named_settings(self) -> dict[str, Any]:
        """Returns the plain attributes of the objective and its parts: numbers, text, tensors, and tuples of these.

        They are named by owner and attribute.
        """
        owners = [(i, owner) for i, owner in enumerate(self.configured) if owner is not self.net_buffers]
        return {
            f"{i}.{name}": v
            for i, owner in owners
            for name, v in vars(owner).items()
            if _is_plain(v) and name != "training" and name[0] != "_"
        }

    def local_settings(self) -> dict[str, Any]:
        """Returns the plain settings of local training, by dotted name as in a config."""
        owners: dict[str, Any] = {"": self, "ascent": self.ascent, "optimizer": self.optimizer}
        owners |= {f"parts.{i}": part for i, part in enumerate(self.parts)}
        return {
            f"{path}.{name}".lstrip("."): v
            for path, owner in owners.items()
            if owner is not None
            for name, v in vars(owner).items()
            if type(v) in (int, float) or (isinstance(v, bool | str) and name != "training" and name[0] != "_")
        }

    def local_numbers(self) -> dict[str, float]:
        """Returns the settings in which clients that train at once may differ: numbers, but none of further parts."""
        settings = self.local_settings().items()
        return {n: float(v) for n, v in settings if type(v) in (int, float) and not n.startswith("parts.")}

    def change_setting(self, name: str, value: Any) -> None:
        """Changes one of the `named_settings`."""
        i, _, attribute = name.partition(".")
        setattr(self.configured[int(i)], attribute, move_data_to_device(value, next(self.net.parameters()).device))

    def client_inits(self) -> dict[str, Init]:
        """Returns the initial values of all state that a client keeps."""
        inits = {name: _as_kept(init) for owner in self._owners for name, init in owner.client_state.items()}
        return {**inits, **(self.optimizer.named_state if self.optimizer.keeps_state else {})}

    def scratch_inits(self) -> dict[str, Init]:
        """Returns the initial values of all state that lives during one round's local training."""
        return {name: init for owner in self._owners for name, init in owner.scratch_state.items()}

    def server_inits(self) -> dict[str, Init]:
        """Returns the initial values of all state that the server keeps in addition to ``w``."""
        return {name: init for owner in self._owners for name, init in owner.server_state.items()}

    @property
    def only_averages(self) -> bool:
        """Whether a round's model is the mean of the clients' models, and nothing else happens to it."""
        inherited = all(getattr(type(self), name) is getattr(Hooks, name) for name in ("local_end", "server_step"))
        return inherited and type(self.server_update) is ServerUpdate and self.server_update.lr == 1

    @property
    def needs_rounds(self) -> str:
        """Why the algorithm has no meaning where clients start from models of different age; empty if it has one."""
        down, up = (", ".join(n for n in names if n not in ("w", "buffers")) for names in self.wire)
        reasons = {
            f"its {self.phases} phases need the same clients at one model": self.phases > 1,
            "its duals belong to one model that all clients start from": not self.adds_updates,
            f"its clients receive {down}, which the server makes of the clients of a round": down,
            f"its server needs {up} of clients that started from one model": up,
            "its server remembers each client's last model": bool(self.recalled),
            "its server computes with the exact upload w": "w" not in self.all_references,
            "its clients' states depend on the server's next step": type(self).client_round_end
            is not Hooks.client_round_end,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def wire(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All names that are sent to a client, and all names that it uploads."""
        return tuple(n for x in self._owners for n in x.down), tuple(n for x in self._owners for n in x.up)

    @property
    def all_logs(self) -> tuple[str, ...]:
        """Names of the numbers that hooks log."""
        return tuple(name for owner in self._owners for name in owner.logs)

    @property
    def all_references(self) -> dict[str, str | float]:
        """References of this objective and its parts."""
        return {name: reference for owner in self._owners for name, reference in owner.references.items()}

    def known(self, sent: State) -> dict[str, Tensor]:
        """Returns the values that clipping rules subtract from the uploads first, by name; see ``references``.

        Args:
            sent: The state that the clients receive.
        """
        references = self.all_references
        inits = {name: references[name] for name in self.wire[1] if name in references}
        values = State.initial({name: init for name, init in inits.items() if init not in sent}, sent.w, sent.w)
        return self.encoded({name: sent[str(init)] if init in sent else values[name] for name, init in inits.items()})

    @cached_property
    def models(self) -> frozenset[str]:
        """Names of client state, server state and uploads that are models; other vectors are duals and the like."""
        inits = {**self.server_inits(), **self.scratch_inits(), **self.client_inits()}
        probe = torch.arange(1.0, self.flat.d + 1)
        known = {"w", "start", *(name for name, init in inits.items() if _is_model(init, probe))}
        return frozenset(known | {name for name, reference in self.all_references.items() if reference in known})

    @property
    def own_part(self) -> Part | None:
        """The part with which a client can train by itself."""
        return next((part for part in self.parts if type(part).end_alone is not Part.end_alone), None)

    @property
    def trains_alone(self) -> bool:
        """Whether clients train by themselves before each round."""
        return self.own_part is not None and self.own_part.trains_alone

    def alone(self, ctx: RoundContext) -> Part | None:
        """Returns `own_part` if the context is that of its training, a phase beyond those of the algorithm."""
        return self.own_part if ctx.phase == self.phases else None

    @property
    def sums_over_kept(self) -> bool:
        """Whether the server computes with what it has kept of clients."""
        return self.surveys or type(self).round_start is not Hooks.round_start

    def direction_alone(
        self, part: Part, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext
    ) -> Tensor:
        """Returns the direction of a step before the round, given the part that `alone` returns."""
        g = Composed.local_gradient(self, w, grad, client, received, ctx) if part.ascends_alone else grad(w)
        return part.direction_alone(w, g, received)

    def moving(self, w: Tensor, ctx: RoundContext) -> Tensor | None:
        """Returns a mask of the weights that local steps change; see `Part.moving`."""
        return _all_of(part.moving(w, ctx.phase == self.phases) for part in self.parts)

    def local_gradient(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        """See `Hooks`; the gradient that an ascent takes is that of the weights that the parts let it move."""
        mask = _all_of(part.perturbed(w) for part in self.parts)
        if mask is None or self.ascent is None:
            return super().local_gradient(w, grad, client, received, ctx)

        def within(v: Tensor, *losses: Any) -> Tensor:
            return torch.where(mask, grad(v, *losses), 0)

        return grad(w + self.ascent(w, within, client, received, ctx))

    def seen_state(self, w: Tensor, client: State, received: State) -> tuple[State, State]:
        """Returns the client's state and what it received as the hooks of a step see them; see `Part.seen_state`."""
        for part in self.parts:
            client, received = part.seen_state(w, client, received, self.models)
        return client, received

    def encoded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns values as they travel; see `Part.encoded`."""
        return dict(through((part.encoded for part in self.parts), values))

    @property
    def personal(self) -> bool:
        """Whether some part gives clients models of their own."""
        return any(type(part).client_model is not Part.client_model for part in self.all_parts)

    @property
    def has_global_model(self) -> bool:
        """Whether the server's weights are a model; see `Part`."""
        return all(part.has_global_model for part in self.parts)

    @property
    def shared(self) -> list[str] | None:
        """Names of the parameters of which there is one value for all clients; None: all."""
        shared = [part.shared for part in self.parts if part.shared is not None]
        return [name for name in shared[0] if all(name in names for names in shared)] if shared else None

    def check_global_model(self, what: str) -> None:
        """Raises a `UserError` if there is no global model for ``what``."""
        ensure(
            self.has_global_model,
            f"model.parts: some weights stay with each client, so there is no global model for {what}; evaluate the "
            "clients' own models (fl-lightning test, ClientEvaluation, ClientLambdaMax)",
        )

    def client_model(self, w: Tensor, client: State) -> Tensor:
        """Returns the weights ``(d,)`` of a client's own model; the global ones if no part is personal.

        Args:
            w: The global weights, ``(d,)``.
            client: The client's state between rounds.
        """
        return through((part.client_model for part in self.all_parts), w, client)


def same_setting(one: Any, other: Any) -> bool:
    """Returns whether two values of a plain attribute are equal, see `Composed.named_settings`."""
    tensors = [isinstance(value, Tensor) for value in (one, other)]
    if any(tensors):
        same_type = all(tensors) and one.dtype == other.dtype
        return one is other or (same_type and torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_setting, one, other))
    return bool(one == other)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, bool | int | float | str | Tensor)


def _all_of(masks: Iterable[Tensor | None]) -> Tensor | None:
    """Returns where all masks are true; None: there is no mask."""
    actual = [mask for mask in masks if mask is not None]
    return reduce(torch.logical_and, actual) if actual else None


def _as_kept(init: Init) -> Init:
    """Returns an initial value of the dtype of the weights, in which clients' rows are kept."""
    return (lambda w0: init(w0).to(w0.dtype)) if callable(init) else init


def _is_model(init: Init, probe: Tensor) -> bool:
    """Returns whether an initial value is the model, as a word or as a function of the initial model."""
    if not callable(init):
        return init in ("w0", "w")
    try:
        return torch.equal(init(probe), probe)
    except RuntimeError:  # it wants another device, or a model
        return False
