"""The local objective of a client as a LightningModule, and the hooks that make it an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.lightning_optimizer import CentralizedOptimizer
from fl_lightning.algorithms.metrics import Metrics
from fl_lightning.algorithms.module import SupervisedModule
from fl_lightning.algorithms.parts.ascent import Ascent
from fl_lightning.algorithms.parts.averaging import Averaging
from fl_lightning.algorithms.parts.base import Gradient, Part, Step
from fl_lightning.algorithms.parts.buffers import Buffers, Policy
from fl_lightning.algorithms.parts.relaxed import RelaxedInit
from fl_lightning.algorithms.parts.server_optimizers import ServerUpdate
from fl_lightning.algorithms.parts.sgd import SGD
from fl_lightning.algorithms.parts.torch_optimizer import TorchOptimizer
from fl_lightning.core import (
    ClientContext,
    FlatSpec,
    Init,
    NonNegative,
    RoundContext,
    State,
    Upload,
    Uploads,
    UserError,
    Weighting,
    ensure,
    weights,
)
from fl_lightning.core.frozen import moving_buffers


class LocalObjective(SupervisedModule):
    """A network, its loss, and the hooks of a federated algorithm; by default FedAvg.

    A subclass overrides only what its paper changes. Vectors have shape ``(..., d)``: ``(d,)`` for one client,
    ``(clients, d)`` for several at once; hooks never change one in place. A client's hooks see what it received (the
    names in ``down``) and its own state; the server's hooks see averages of the uploads (the names in ``up``).

    Args:
        net: The network: a batch to logits.
        loss: Losses per sample ``(logits, target) -> (n,)``; a loss with a ``reduction`` is copied and reduces nothing.
            ``label_smoothing`` acts in training only.
        optimizer: The local optimizer: SGD, or TorchOptimizer for those of torch.
        ascent: Where the gradient is taken: null (at the weights), SAM, ASAM, or your own.
        server_update: The server's step along the pseudo-gradient: ServerUpdate (averaging), ServerMomentum,
            ServerAdam, ServerYogi, ServerAdagrad.
        averaging: Average of the global model that evaluation uses: null, SWA or EMA.
        weighting: Weights of the clients' models in their average: samples or uniform; null: the algorithm's default.
        relaxed_init: FedInit's b: a client starts from ``w^t + b (w^t - its last local model)``; 0: from ``w^t``.
        init_weights: Initial weights of the net: a file (state_dict or checkpoint), or from Python a state_dict.
        buffers: How the running statistics of BatchNorm, and other buffers, are treated: average, local or reset (see
            `fl_lightning.algorithms.parts.buffers.Buffers`); null refuses nets that have any.
        metrics: Metrics of torchmetrics to evaluate in addition to the data's own: class names, or class_path and
            init_args; as a list, or by name.

    Attributes:
        net_buffers: The net's buffers; None if it has none.
        trained: Whether a run has trained the net.
        client_state: State that a client keeps, by name with its initial value (see `fl_lightning.core.state.Init`).
        scratch_state: The same for state that lives during one round's local training and is never stored.
        server_state: State that the server keeps in addition to ``w``.
        down: Names of server state that is sent to a client.
        up: Names that a client uploads.
        references: What the server knows of uploads beforehand, for rules that clip what is new in them; by name that
            of a value which is sent, "zeros" for a vector ``(d,)``, or a number for a scalar ``(1,)``. An upload that
            is missing here cannot be clipped, and the algorithm not be trained under differential privacy.
        adds_updates: Whether the server adds the clients' updates to ``w^t`` rather than take their models as they are;
            they differ only where local training starts elsewhere (``relaxed_init``).
        refers_to_received: Whether the local objective refers to the received model, so that it has no meaning without
            a server.
        needs_sgd: Why local steps must be those of SGD, as the rest of a sentence; "": they may be those of any local
            optimizer.
        needs_classes: Whether it is defined for one class a sample only.
        uses_class_counts: Whether the client's hooks see ``ctx.class_counts``.
        phases: How often a round's cohort receives and uploads; ``ctx.phase`` counts them.
        default_weighting: The weighting of the paper's box.
        paper: Where the algorithm comes from.
    """

    trained: bool = False
    client_state: Mapping[str, Init] = {}
    scratch_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ("w",)
    up: tuple[str, ...] = ("w",)
    references: Mapping[str, str | float] = {"w": "w"}
    adds_updates: bool = True
    refers_to_received: ClassVar[bool] = False
    needs_sgd: ClassVar[str] = ""
    needs_classes: ClassVar[bool] = False
    uses_class_counts: ClassVar[bool] = False
    phases: ClassVar[int] = 1
    default_weighting: Weighting = "samples"
    paper: ClassVar[str] = ""

    # The hooks of a round, in their order

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """Returns what is sent this round, of which clients get the names in ``down``."""
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

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Returns what a client uploads after its last step, which ended at ``w``, and its state."""
        return {"w": w}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Returns the server's next state, from averages of the uploads."""
        return self.server_update(server, sent.w - uploads.weighted("w"), ctx)

    # Construction

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | None = None,
        optimizer: SGD | TorchOptimizer | None = None,
        ascent: Ascent | None = None,
        server_update: ServerUpdate | None = None,
        averaging: Averaging | None = None,
        weighting: Weighting | None = None,
        relaxed_init: NonNegative = 0.0,
        init_weights: str | dict[str, Any] | None = None,
        buffers: Policy | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(net, loss, metrics)
        self.optimizer = SGD() if optimizer is None else optimizer
        ensure(
            not self.needs_sgd or isinstance(self.optimizer, SGD),
            f"model.optimizer = {type(optimizer).__name__}: {type(self).__name__} {self.needs_sgd}; take SGD",
        )
        self.ascent = ascent
        self.server_update = ServerUpdate() if server_update is None else server_update
        self.averaging = averaging
        self.weighting: Weighting = weighting or self.default_weighting
        self.relaxed_init = relaxed_init
        if init_weights is not None:
            weights.initialize(net, init_weights)
        named = moving_buffers(net)
        if named and buffers is None:
            raise UserError(
                f"model.net has the buffer '{named[0]}': choose how running statistics are treated by model.buffers = "
                "average, local or reset, or use GroupNorm"
            )
        self.net_buffers = Buffers(net, buffers) if named and buffers is not None else None
        ensure(
            any(p.requires_grad for p in net.parameters()),
            f"model.net = {type(net).__name__} has no parameter to train; set requires_grad of some",
        )
        self.flat = FlatSpec(net)
        self.optimizer.check(self.flat)

    # The hooks with those of the parts: what engines and the trainer call

    @property
    def parts(self) -> list[Part]:
        """The parts of this objective, in the order in which their hooks run."""
        relaxed = RelaxedInit(self.relaxed_init, self.adds_updates) if self.relaxed_init else None
        parts = (self.ascent, self.server_update, relaxed, self.averaging, self.net_buffers)
        return [part for part in parts if part is not None]

    @property
    def _owners(self) -> tuple[LocalObjective | Part, ...]:
        return self, *self.parts

    def client_inits(self) -> dict[str, Init]:
        """Returns the initial values of all state that a client keeps."""
        own = {name: init for owner in self._owners for name, init in owner.client_state.items()}
        return {**own, **self.optimizer.client_state(self.flat)}

    def server_inits(self) -> dict[str, Init]:
        """Returns the initial values of all state that the server keeps in addition to ``w``."""
        return {name: init for owner in self._owners for name, init in owner.server_state.items()}

    @property
    def wire(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All names that are sent, and all names that are uploaded."""
        return tuple(n for x in self._owners for n in x.down), tuple(n for x in self._owners for n in x.up)

    @property
    def all_references(self) -> dict[str, str | float]:
        """References of this objective and its parts."""
        return {name: of for owner in self._owners for name, of in owner.references.items()}

    def known(self, sent: State) -> dict[str, Tensor]:
        """Returns what the server knows of the uploads beforehand, by name, for those that have a reference.

        Args:
            sent: What the clients receive.
        """
        references = self.all_references
        inits = {name: references[name] for name in self.wire[1] if name in references}
        values = State.initial({name: of for name, of in inits.items() if of not in sent}, sent.w, sent.w)
        return {name: sent[str(of)] if of in sent else values[name] for name, of in inits.items()}

    def lr(self, ctx: RoundContext) -> float:
        """Returns the learning rate of a round's local steps."""
        lr = self.optimizer.lr_at(ctx.t, ctx.rounds)
        for part in self.parts:
            lr = part.local_lr(lr, ctx)
        return lr

    def begin_local(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Returns the weights where local training starts, and the client's state, with these weights as ``start``.

        Raises:
            UserError: If the algorithm has state of that name.
        """
        ensure(
            "start" not in client,
            f"{type(self).__name__}: state 'start' is where local training starts; choose another name",
        )
        w, client = self.local_start(client, received, ctx)
        for part in self.parts:
            w, client = part.local_start(w, client, received, ctx)
        return w, client | {"start": w}

    def finish_local(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Returns what a client uploads after its last step, which ended at ``w``, and its state.

        Raises:
            UserError: If `local_end` uploads other names than declared.
        """
        upload, client = self.local_end(w, client, received, ctx)
        ensure(
            set(upload) == set(self.up),
            f"{type(self).__name__}.local_end uploads {sorted(upload)}, but declares up = {self.up}",
        )
        for part in self.parts:
            upload, client = part.local_end(w, upload, client, received, ctx)
        return upload, client

    def finish_phase(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Returns the server's state after a phase."""
        server = self.server_step(server, sent, uploads, ctx)
        for part in self.parts:
            server = part.phase_end(server, uploads)
        return server

    def finish_round(self, server: State, before: State, ctx: RoundContext) -> State:
        """Returns the server's state after a round that began with the state ``before``."""
        for part in self.parts:
            server = part.round_end(server, before, ctx)
        return server

    def teachers(self, client: State, received: State) -> tuple[Tensor, ...]:
        """Returns the weights of all teachers."""
        teacher = self.teacher(client, received)
        return (teacher,) if isinstance(teacher, Tensor) else teacher or ()

    @property
    def passes(self) -> tuple[int, int]:
        """Numbers of forward and backward passes of a local step."""
        backward = 1 if self.ascent is None else self.ascent.passes
        has_teacher = type(self).teacher is not LocalObjective.teacher
        return backward + has_teacher, backward

    # Centralized training under lightning.Trainer

    def configure_optimizers(self) -> Any:
        """Returns the local optimizer (with its ascent) for ``lightning.Trainer``; its learning rate changes by epoch.

        Raises:
            UserError: If the algorithm keeps client or server state.
        """
        epochs = self.trainer.max_epochs or 1
        averaged = any(getattr(x, "keeps_averages", False) for x in self.trainer.callbacks)  # type: ignore[attr-defined]
        self.check_centralized(averaged)
        optimizer = CentralizedOptimizer(
            self.net,
            self.flat,
            self.optimizer,
            self.local_step,
            self.scratch_state,
            lambda lr: ClientContext(self.trainer.current_epoch, epochs, 1, self.flat, lr=lr, K=1, k_lr=lr),
            lambda: self.trainer.accumulate_grad_batches,
        )
        factor = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: self.lr(RoundContext(epoch, epochs, 1, self.flat)) / self.optimizer.lr
        )
        return {"optimizer": optimizer, "lr_scheduler": factor}

    def check_centralized(self, averaged: bool = False) -> None:
        """Checks that the objective can be trained without a federation.

        Args:
            averaged: Whether a callback keeps the average of ``averaging``.

        Raises:
            UserError: If there is client or server state, or the local objective refers to the received model.
        """
        ensure(
            isinstance(self.optimizer, SGD),
            f"model.optimizer = {type(self.optimizer).__name__}: centralized training takes SGD",
        )
        state = {*self.client_inits(), *self.server_inits()} - {"buffers"}
        if averaged and self.averaging is not None:
            state -= set(self.averaging.server_state)
        ensure(
            not state and (not self.refers_to_received),
            f"{type(self).__name__} keeps federated state ({', '.join(sorted(state)) or 'the received model'}): "
            "train it with fl_lightning.FederatedTrainer, not with lightning.Trainer",
        )
