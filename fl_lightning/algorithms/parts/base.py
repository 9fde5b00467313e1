"""The interface of an objective's parts, and the types of what local training passes around."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from fl_lightning.core import (
    Checked,
    ClientContext,
    FlatSpec,
    Init,
    RoundContext,
    State,
    Upload,
    Uploads,
    UserError,
)

Gradient = Callable[..., Tensor]
"""The gradient of the local objective on this step's minibatch, as a function of a point ``(..., d)``. A second
argument, losses per sample with the arguments of `LocalObjective.losses`, replaces those of the objective."""
Direction = Tensor | tuple[Tensor, Tensor]
"""Direction of a local step: a vector ``(..., d)``, or two that are added, of which only the first is clipped."""
Step = tuple[Direction, State]
"""A direction, and the client's state after the step."""
Further = Callable[[int], Tensor]
"""Further losses of the samples of a minibatch, ``(n,)``, given their number n."""
A = TypeVar("A")


class Part(Checked, key="model.parts"):
    """A piece that combines with every algorithm: state of its own, and hooks that by default change nothing.

    A hook of a part runs after the algorithm's hook of the same moment. Those of several parts run in the order of
    `LocalObjective.all_parts`: the parts of the named slots first, then those of ``model.parts`` as they are listed.
    Hooks run once per client and phase, or once per round, and never in a local step. On the client their vectors are
    ``(..., d)``, as in an algorithm's hooks, and they read the client's state, what it received and the context. They
    change their own state only, unless they say otherwise.

    Attributes:
        client_state: State that a client keeps, by name with its initial value (see `fl_lightning.core.state.Init`).
        scratch_state: The same for state that lives from `local_start` to `local_end` and is never stored.
        server_state: The same for the server.
        down: Names that are sent to a client, in addition to the algorithm's.
        up: Names that a client uploads, in addition to the algorithm's.
        logs: Names of the numbers that `local_end` logs, by ``ctx.log``.
        trains_alone: Whether a client also trains before each round, by itself, from its own model (`client_model`).
        epochs_alone: The epochs of that; 0: as many steps as in the round, on the same minibatches.
        ascends_alone: Whether ``model.ascent`` acts on its steps, too.
        shared: Names of the parameters that do not stay with clients; None: all.
        has_global_model: Whether the server's weights are a model; otherwise those of each client's own model are.
        references: For each of these uploads the value that clipping rules subtract first, as for `LocalObjective`.
        packs: Whether clients are on other machines; then `local_end` may upload bytes, which `arrived` decodes.
    """

    client_state: Mapping[str, Init] = {}
    scratch_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    trains_alone: bool = False
    epochs_alone: int = 0
    ascends_alone: bool = False
    shared: list[str] | None = None
    has_global_model: ClassVar[bool] = True
    references: Mapping[str, str | float] = {}
    packs: bool = False

    def bind(self, flat: FlatSpec) -> "Part":
        """Returns the part for one objective: itself, or a copy that depends on the layout of the weights."""
        return self

    def attach(self, objective: Any) -> None:
        """Takes from the objective what the part depends on, such as its uploads; once, after all constructors.

        Args:
            objective: The `LocalObjective`; nothing may have been declared of it later.

        Raises:
            UserError: If the part does not fit it.
        """

    def local_lr(self, lr: float, ctx: RoundContext) -> float:
        """Returns the clients' learning rate in this round, given the one that it would be without this part."""
        return lr

    def further(self, net: nn.Module) -> "AbstractContextManager[Further] | None":
        """Returns a context for a forward pass of the net on a minibatch, which gives further losses of its samples.

        They are added to the local objective. They may depend on all that the context has seen of the pass.
        """
        return None

    def seen_state(self, w: Tensor, client: State, received: State, models: frozenset[str]) -> tuple[State, State]:
        """Returns the client's state and what it received as the algorithm's hooks see them at the weights ``w``.

        Before a step, and after the last one; the step's hooks return the state that they see.

        Args:
            w: The local weights, ``(..., d)``.
            client: The client's state, with ``start``.
            received: What the client received.
            models: The names of both that are models; other vectors ``(d,)`` are duals, variates and the like.
        """
        return client, received

    def moving(self, w: Tensor, alone: bool) -> Tensor | None:
        """Returns a mask ``(d,)`` of the weights that local steps change, before the round or in it; None: all."""
        return None

    def perturbed(self, w: Tensor) -> Tensor | None:
        """Returns a mask ``(d,)`` of the weights that ``model.ascent`` moves; None: all."""
        return None

    def direction_alone(self, w: Tensor, g: Tensor, received: State) -> Tensor:
        """Returns the direction of a step before the round, given the gradient of the local objective for ``w``."""
        return g

    def end_alone(self, w: Tensor, client: State) -> State:
        """Returns what a client keeps of its training before the round, which ended at ``w``."""
        return client

    def encoded(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns values as they travel, to a client or from it; after all hooks of the client."""
        return values

    def decoded(self, uploads: Uploads, sent: State, models: frozenset[str]) -> Uploads:
        """Returns the averages of what has travelled, as the server's step reads them.

        Args:
            uploads: The averages of encoded uploads.
            sent: What the clients received.
            models: The names that are models, as for `seen_state`.
        """
        return uploads

    def broadcast(self, sent: State, ctx: RoundContext) -> State:
        """Returns what the server sends, given what it would send without this part."""
        return sent

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Returns the weights where local training starts, given those without this part, and the client's state."""
        return w, client

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """Returns what a client uploads and keeps after its last step, which ended at ``w``.

        A part may change what the algorithm uploads, as compression does; the server averages the values returned here.
        """
        return upload, client

    def arrived(self, upload: Upload, received: State, ctx: ClientContext) -> Upload:
        """Returns the upload of a client on another machine, given what has travelled.

        Raises:
            ValueError: If this cannot be decoded.
        """
        return upload

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        """Returns the bits that each value takes on the wire, by name: the length of its encoding.

        Args:
            bits: The bits without this part: by default those of all numbers of the value.
            values: What is sent to a client, or what one client uploads, by name.
            up: Whether a client uploads it.
        """
        return bits

    def phase_end(self, server: State, uploads: Uploads) -> State:
        """Returns the server's state after its step of a phase."""
        return server

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        """Returns the server's state after a round that began with the state ``before``."""
        return server

    def client_model(self, w: Tensor, client: State) -> Tensor:
        """Returns the weights ``(d,)`` of a client's own model, given the global ones and the client's state."""
        return w


def through(hooks: Iterable[Callable[..., A]], value: A, *args: Any) -> A:
    """Returns a value that has gone through hooks: each gets what the one before has returned, and the arguments."""
    for hook in hooks:
        value = hook(value, *args)
    return value


def check_owners(what: str, declared: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Checks that each name has one owner.

    Args:
        what: What the names stand for, for the error message.
        declared: Owners, each with the names that it declares.

    Raises:
        UserError: If two owners declare the same name.
    """
    owners: dict[str, str] = {}
    for owner, names in declared:
        for name in names:
            if name in owners:
                raise UserError(f"{owner}: {what} '{name}' belongs to {owners[name]}; choose another name")
            owners[name] = owner
