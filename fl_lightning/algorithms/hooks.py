"""The hooks that make a local objective a federated algorithm."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from fl_lightning.algorithms.parts import Ascent, Gradient, ServerUpdate, Step
from fl_lightning.core import ClientContext, Init, RoundContext, State, Upload, Uploads, Weighting

Sum = Callable[[Callable[[State], Tensor]], Tensor]
"""The sum over some clients of a function of a client's state, which returns a vector or a scalar ``(1,)``."""


class Hooks:
    """The declarations and the hooks of an algorithm; by default FedAvg.

    A subclass of `LocalObjective` overrides only what its paper changes. Vectors have shape ``(..., d)``: ``(d,)`` for
    one client, ``(clients, d)`` for several at once; hooks never change one in place. A client's hooks see what it
    received (the names in ``down``) and its own state; the server's hooks see averages of the uploads (the names in
    ``up``).

    Attributes:
        client_state: State that a client keeps, by name with its initial value (see `fl_lightning.core.state.Init`).
        scratch_state: The same for state that lives during one local training and is never stored.
        server_state: State that the server keeps in addition to ``w``.
        down: Names of server state that is sent to a client; one of them is ``w``.
        up: Names that a client uploads.
        logs: Names of the numbers that `local_end` and `server_step` log, by ``ctx.log``.
        references: For each upload the value that clipping rules subtract first: the name of a value that is sent,
            "zeros" for a vector ``(d,)``, or a number for a scalar ``(1,)``. An upload without one cannot be clipped,
            so the algorithm cannot be trained under differential privacy.
        recalled: Names in ``up`` that the server computes itself, from what it has kept of a client's earlier uploads:
            they take no bits, and no fault changes them.
        dense: Names in ``up`` that no part shortens, since the server uses their direction alone.
        surveys: Whether the server's step ends with `survey`.
        sums: By upload, the client state to which the client has added it. A part that changes the upload changes this
            state alike, so that the server's sum stays that of the clients.
        adds_updates: Whether the server adds the clients' updates to ``w^t``; otherwise it takes their models as they
            are. The two differ only where local training starts elsewhere (``relaxed_init``).
        refers_to_received: Whether the local objective refers to the received model, and so needs a server.
        needs_sgd: If the algorithm requires SGD, the reason, which completes the error message; otherwise empty.
        needs_classes: Whether every sample must have one class.
        uses_class_counts: Whether the client's hooks read ``ctx.class_counts``.
        phases: Number of times that a round's cohort receives and uploads; ``ctx.phase`` counts them.
        default_weighting: The weighting of the paper.
        paper: The paper.
        ascent: See `LocalObjective`.
        server_update: See `LocalObjective`.
    """

    client_state: Mapping[str, Init] = {}
    scratch_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ("w",)
    up: tuple[str, ...] = ("w",)
    logs: tuple[str, ...] = ()
    references: Mapping[str, str | float] = {"w": "w"}
    recalled: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    surveys: bool = False
    sums: Mapping[str, str] = {}
    adds_updates: bool = True
    refers_to_received: ClassVar[bool] = False
    needs_sgd: ClassVar[str] = ""
    needs_classes: ClassVar[bool] = False
    uses_class_counts: ClassVar[bool] = False
    phases: ClassVar[int] = 1
    default_weighting: Weighting = "samples"
    paper: ClassVar[str] = ""

    ascent: Ascent | None
    server_update: ServerUpdate

    # In the order of a round

    def round_start(self, server: State, total: Sum, ctx: RoundContext) -> State:
        """Returns the server's state at the start of a round, given what it has kept of the clients of this round.

        Args:
            server: Its state.
            total: The sum over the clients that will answer, of their states before the round: at first contact the
                initial ones. The function may use only what a client has uploaded before.
            ctx: The context.
        """
        return server

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """Returns the state to send this round; clients receive its names in ``down``."""
        return server

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Returns the weights where local training starts (``client.start`` in later hooks), and the client's state."""
        return received.w, client

    def teacher(self, client: State, received: State) -> Tensor | tuple[Tensor, ...] | None:
        """Returns weights ``(d,)`` whose output on each minibatch is an argument of `losses`; several; or None."""
        return None

    def loss_constants(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, ...]:
        """Returns further arguments of `losses`, the same in all steps of a round, ``(..., any)``."""
        return ()

    def step_lr(self, client: State, ctx: ClientContext) -> float | Tensor:
        """Returns the learning rate of one local step."""
        return ctx.lr

    def local_gradient(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        """Returns the gradient at the ascent point, or at ``w`` if there is no ascent."""
        return grad(w) if self.ascent is None else grad(w + self.ascent(w, grad, client, received, ctx))

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Returns the direction of one local step (descent goes against it), and the client's state after it."""
        return self.local_gradient(w, grad, client, received, ctx), client

    def after_step(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Tensor:
        """Returns the weights ``(..., d)`` after one local step, given those to which the local optimizer has moved."""
        return w

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Returns what a client uploads after its last step, which ended at ``w``, and its state."""
        return {"w": w}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Returns the server's next state, from averages of the uploads."""
        return self.server_update(server, sent.w - uploads.weighted("w"), ctx)

    def survey(self, server: State, total: Sum, ctx: RoundContext) -> State:
        """Returns the server's state after its step, given what it has kept of all clients; called if ``surveys``.

        Args:
            server: Its state.
            total: The sum over all clients ever seen, of their states; of this round's cohort of the new ones.
            ctx: The context.
        """
        return server

    def client_round_end(self, client: State, server: State) -> State:
        """Returns what a client keeps, given its state after local training and the server's after its step."""
        return client

    def teachers(self, client: State, received: State) -> tuple[Tensor, ...]:
        """Returns the weights of all teachers."""
        teacher = self.teacher(client, received)
        return (teacher,) if isinstance(teacher, Tensor) else teacher or ()
