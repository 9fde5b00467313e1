"""The local objective of a client as a LightningModule, and the hooks that make it an algorithm."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.lightning_optimizer import CentralizedOptimizer
from fl_lightning.algorithms.parts.ascent import Ascent, Gradient
from fl_lightning.algorithms.parts.averaging import Averaging
from fl_lightning.algorithms.parts.server_optimizers import ServerUpdate
from fl_lightning.algorithms.parts.sgd import SGD, Direction
from fl_lightning.core import weights
from fl_lightning.core.buffers import POLICIES, Buffers, Policy
from fl_lightning.core.errors import UserError, require
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.state import ClientContext, Init, RoundContext, State, Upload, Uploads, Weighting


class LocalObjective(L.LightningModule):
    """Net, loss and metrics, and the hooks of a federated algorithm. As it stands, it is FedAvg.

    A subclass overrides only what its paper changes. Vectors have shape ``(..., d)``; hooks never change one in place.
    The client's hooks see what was sent (``down``) and their own slots, the server's see averages of what was uploaded
    (``up``): nothing else exists.

    Args:
        net: The network: a batch to logits.
        loss: Per-sample losses ``(logits, target) -> (n,)``; a ``reduction`` attribute is set to "none". With
            ``label_smoothing`` only training is smoothed.
        optimizer: The local optimizer.
        ascent: Where the gradient is taken: null (at the weights), SAM, ASAM, or your own.
        server_update: What the server makes of the pseudo-gradient: ServerUpdate (averaging), ServerMomentum,
            ServerAdam, ServerYogi, ServerAdagrad.
        averaging: Average of the global model that evaluation uses: null, SWA or EMA.
        weighting: Weights of the clients' models in their average: samples or uniform; null: the algorithm's own.
        relaxed_init: FedInit's b: a client starts from ``w^t + b (w^t - its last local model)``; 0: from ``w^t``.
        init_weights: Initial weights of the net: a file (state_dict or checkpoint), or from Python a state_dict.
        buffers: What becomes of the running statistics of BatchNorm, and of other buffers: average, local or reset (see
            `fl_lightning.core.buffers.Buffers`); null refuses nets that have any.

    Attributes:
        net_buffers: The net's buffers; None if it has none.
        client_state: State that a client keeps, by name with its first value (see `fl_lightning.core.state.Init`).
        scratch_state: The same for what lives during one round's local training and is never stored.
        server_state: State that the server keeps beside ``w``.
        down: Names of server slots that are sent to a client.
        up: Names that a client uploads.
        adds_updates: Whether the server adds the clients' updates to ``w^t`` rather than take their models as they are;
            it matters only where local training starts elsewhere (``relaxed_init``).
        refers_to_received: Whether the local objective refers to the model received, so that there is none without it.
        phases: How often a round's cohort receives and uploads; ``ctx.phase`` counts them.
        default_weighting: The weighting of the paper's box.
        paper: Where the algorithm comes from.
    """

    client_state: Mapping[str, Init] = {}
    scratch_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ("w",)
    up: tuple[str, ...] = ("w",)
    adds_updates: bool = True
    refers_to_received: ClassVar[bool] = False
    phases: ClassVar[int] = 1
    default_weighting: Weighting = "samples"
    paper: ClassVar[str] = ""

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | None = None,
        optimizer: SGD | None = None,
        ascent: Ascent | None = None,
        server_update: ServerUpdate | None = None,
        averaging: Averaging | None = None,
        weighting: Weighting | None = None,
        relaxed_init: float = 0.0,
        init_weights: str | dict[str, Any] | None = None,
        buffers: Policy | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss() if loss is None else loss
        if hasattr(self.loss, "reduction"):
            setattr(self.loss, "reduction", "none")  # noqa: B010  a string on a module, which mypy takes for a tensor
        self.optimizer = SGD() if optimizer is None else optimizer
        self.ascent = ascent
        if ascent is not None:
            self.down = (*self.down, *ascent.down)
        self.server_update = ServerUpdate() if server_update is None else server_update
        self.averaging = averaging
        self.weighting: Weighting = weighting or self.default_weighting
        self.relaxed_init = relaxed_init
        if init_weights is not None:
            load_weights(net, init_weights)
        require(buffers in (None, *POLICIES), "model.buffers", buffers, f"choose from null, {', '.join(POLICIES)}")
        named = [name for name, _ in net.named_buffers()]
        if named and buffers is None:
            raise UserError(
                f"model.net has the buffer '{named[0]}': say what becomes of running statistics by model.buffers = "
                "average, local or reset, or use GroupNorm"
            )
        self.net_buffers = Buffers(net, buffers) if named and buffers is not None else None
        if frozen := [name for name, p in net.named_parameters() if not p.requires_grad]:
            raise UserError(
                f"model.net has the frozen parameter '{frozen[0]}': it would be neither sent nor saved; set its "
                "requires_grad"
            )
        self.flat = FlatSpec(net)

    # What is minimised

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Loss of each sample, ``(n,)``.

        Args:
            logits: The net's output, ``(n, ...)``.
            target: Classes ``(n,)``, or with Mixup their probabilities ``(n, C)``.
            teacher: The teacher's output on the same batch, if `teacher` names weights.
        """
        return self.loss(logits, target)  # type: ignore[no-any-return]

    @property
    def evaluation_loss(self) -> nn.Module:
        """What evaluation and flatness measure: `loss` without label smoothing, to compare runs with and without it."""
        if not getattr(self.loss, "label_smoothing", 0):
            return self.loss
        plain = copy.copy(self.loss)
        vars(plain)["label_smoothing"] = 0.0
        return plain

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Loss of the local objective on a minibatch ``(x, y)`` or ``(x, y, teacher's output)``, a scalar."""
        x, y, *teacher = batch
        return self.losses(self.net(x), y, *teacher).mean()

    def forward(self, x: Tensor) -> Tensor:
        """The net's output."""
        return self.net(x)  # type: ignore[no-any-return]

    # The hooks of a round, in their order

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """What is sent this round, of which clients get the names in ``down``; ``server`` itself stays as it is."""
        return server

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Where local training starts, and what of the client's state is renewed at contact.

        To the hooks that follow, these weights are ``client.start``.
        """
        if not self.relaxed_init:
            return received.w, client
        return received.w + self.relaxed_init * (received.w - client.w_last), client

    def teacher(self, client: State, received: State) -> Tensor | None:
        """Weights ``(d,)`` whose output on each minibatch `losses` gets, without gradient; None: no teacher."""
        return None

    def local_gradient(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        """The gradient at the ascent point, or at ``w`` if there is no ascent."""
        return grad(w) if self.ascent is None else grad(w + self.ascent(w, grad, client, received, ctx))

    def local_step(
        self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext
    ) -> tuple[Direction, State]:
        """Direction of one local step (descent goes against it), and the client's state after it."""
        return self.local_gradient(w, grad, client, received, ctx), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """What a client uploads (the names in ``up``), and what it keeps."""
        return {"w": w}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """The server's next state, from averages of the uploads."""
        return self.server_update(server, sent.w - uploads.weighted("w"), ctx)

    # What follows from the parts

    def lr(self, ctx: RoundContext) -> float:
        """Learning rate of a round's local steps."""
        lr = self.optimizer.lr_at(ctx.t, ctx.rounds)
        return lr if self.averaging is None else self.averaging.lr(lr, ctx)

    def begin_local(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """`local_start`, after which ``client.start`` holds the weights that it returned.

        Raises:
            UserError: If the algorithm has state of that name.
        """
        if "start" in client:
            raise UserError(f"{type(self).__name__}: state 'start' is where local training starts; choose another name")
        w, client = self.local_start(client, received, ctx)
        return w, client | {"start": w}

    def finish_local(
        self,
        w: Tensor,
        client: State,
        received: State,
        ctx: ClientContext,
        buffers: Tensor | None = None,
    ) -> tuple[Upload, State]:
        """`local_end` with what the injected parts add.

        Args:
            w: Weights after the last local step.
            client: The client's state, with ``start``.
            received: What the server sent.
            ctx: The client's context.
            buffers: The net's buffers after the last local step, ``(b,)``, if it has any.

        Raises:
            UserError: If other names are uploaded than declared.
        """
        upload, client = self.local_end(w, client, received, ctx)
        if self.ascent is not None:
            client = self.ascent.local_end(client, received, ctx)
        if self.relaxed_init:
            client = client.replace(w_last=w)
            if self.adds_updates and "w" in upload:
                upload = {**upload, "w": upload["w"] - client.start + received.w}
        if set(upload) != set(self.up):
            raise UserError(f"{type(self).__name__}.local_end uploads {sorted(upload)}, but declares up = {self.up}")
        if self.net_buffers is not None and buffers is not None:
            upload, client = self.net_buffers.end(buffers, upload, client)
        return upload, client

    def finish_phase(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """`server_step` with what the net's buffers add."""
        server = self.server_step(server, sent, uploads, ctx)
        return server if self.net_buffers is None else self.net_buffers.aggregate(server, uploads)

    def finish_round(self, server: State, before: State, ctx: RoundContext) -> State:
        """What the injected parts add to the server's step from ``before``."""
        if self.ascent is not None:
            server = self.ascent.server_end(server, before)
        if self.averaging is not None:
            server = self.averaging.update(server, before.w, ctx)
        return server

    def client_inits(self) -> dict[str, Init]:
        """First values of all client slots, those of the injected parts included."""
        return {
            **self.client_state,
            **(self.ascent.client_state if self.ascent else {}),
            **({"w_last": "w0"} if self.relaxed_init else {}),
            **(self.net_buffers.client_inits() if self.net_buffers else {}),
        }

    def server_inits(self) -> dict[str, Init]:
        """First values of all server slots but ``w``, those of the injected parts included."""
        return {
            **self.server_state,
            **(self.ascent.server_state if self.ascent else {}),
            **self.server_update.first(),
            **(self.averaging.slots if self.averaging else {}),
            **(self.net_buffers.server_inits() if self.net_buffers else {}),
        }

    @property
    def wire(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names that are sent, and names that are uploaded: ``down`` and ``up`` with the net's buffers."""
        more = self.net_buffers.wire if self.net_buffers else ()
        return (*self.down, *more), (*self.up, *more)

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes of a local step."""
        backward = 1 if self.ascent is None else self.ascent.passes
        has_teacher = type(self).teacher is not LocalObjective.teacher
        return backward + has_teacher, backward

    # Centralized training under a plain lightning.Trainer

    def configure_optimizers(self) -> Any:
        """The local optimizer (with its ascent) for ``lightning.Trainer``, its learning rate decaying by epoch.

        Raises:
            UserError: If the algorithm keeps client or server state.
        """
        epochs = self.trainer.max_epochs or 1
        averaged = any(getattr(x, "keeps_averages", False) for x in self.trainer.callbacks)  # type: ignore[attr-defined]
        self.check_centralized(averaged)
        optimizer = CentralizedOptimizer(self.flat.parameters(self.net), self)
        factor = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: self.lr(RoundContext(epoch, epochs, 1, self.flat)) / self.optimizer.lr
        )
        return {"optimizer": optimizer, "lr_scheduler": factor}

    def check_centralized(self, averaged: bool = False) -> None:
        """Refuse what cannot be trained without a federation.

        Args:
            averaged: Whether somebody takes care of ``averaging``.

        Raises:
            UserError: If there is client or server state, or the local objective refers to the received model.
        """
        state = {*self.client_inits(), *self.server_inits()} - {"buffers"}
        if averaged and self.averaging is not None:
            state -= set(self.averaging.slots)
        if state or self.refers_to_received:
            raise UserError(
                f"{type(self).__name__} keeps federated state ({', '.join(sorted(state)) or 'the received model'}): "
                "train it with fl_lightning.FederatedTrainer, not with lightning.Trainer"
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the mean loss of the epoch as ``train/loss``."""
        self.log("train/loss", outputs["loss"], on_step=False, on_epoch=True, prog_bar=True, batch_size=len(batch[1]))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``val/loss`` and ``val/acc``."""
        self._log_evaluation("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``test/loss`` and ``test/acc``."""
        self._log_evaluation("test", *batch)

    def _log_evaluation(self, split: str, x: Tensor, y: Tensor) -> None:
        from torchmetrics.functional.classification import multiclass_accuracy

        logits = self.net(x)
        acc = multiclass_accuracy(logits, y, num_classes=logits.shape[1], average="micro")
        self.log_dict({f"{split}/loss": self.evaluation_loss(logits, y).mean(), f"{split}/acc": acc}, batch_size=len(y))


def load_weights(net: nn.Module, source: str | Mapping[str, Any]) -> None:
    """Load a state_dict, or a file that holds one (of the net, or of a checkpoint of this package), into ``net``.

    Raises:
        UserError: If the file is missing or unreadable, or names and shapes do not fit the net.
    """
    key = "model.init_weights"
    found = weights.read(source, key) if isinstance(source, str) else source
    found = found.get("state_dict", found) if isinstance(found, Mapping) else {}
    given = {name: torch.as_tensor(value) for name, value in found.items()}
    if given.keys() != net.state_dict().keys():  # of a checkpoint, or of an objective
        given = {name.removeprefix("net."): value for name, value in given.items()}
    weights.load(net, given, key)
