"""A federated algorithm as a LightningModule: its parts, what engines and trainer call, and its step in Lightning's."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import BoundArguments
from typing import Any, get_args
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fl_lightning.algorithms.composed import Composed
from fl_lightning.algorithms.metrics import Metrics
from fl_lightning.algorithms.module import Losses, SupervisedModule
from fl_lightning.algorithms.parts import (
    SGD,
    Ascent,
    Averaging,
    Buffers,
    LocalOptimizer,
    Part,
    Policy,
    ServerUpdate,
    check_owners,
    through,
)
from fl_lightning.core import (
    ClientContext,
    FlatSpec,
    NonNegative,
    RoundContext,
    State,
    Upload,
    Uploads,
    UserError,
    Weighting,
    ensure,
    moving_buffers,
    unchanged,
    unregistered,
    weights,
)


class LocalObjective(Composed, SupervisedModule):
    """A network, its loss, and the hooks of a federated algorithm; by default FedAvg.

    A subclass overrides those `Hooks` that its paper changes. Engines and the trainer call the methods below, which run
    the hooks of the algorithm and then those of its parts.

    Args:
        net: The network: a batch to logits.
        loss: Losses per sample ``(logits, target) -> (n,)``; see `SupervisedModule`. ``label_smoothing`` acts in
            training only.
        optimizer: The local optimizer; null: SGD.
        ascent: Where a local step takes the gradient; null: at the weights.
        server_update: The server's step along the pseudo-gradient; null: averaging.
        averaging: Average of the global model that evaluation uses; null: none.
        parts: Further parts, in the order of their hooks.
        weighting: Weights of the clients' models in their mean; null: the algorithm's default.
        relaxed_init: FedInit's b: a client starts from ``w^t + b (w^t - its last local model)``; 0: from ``w^t``.
        init_weights: File of initial weights (state_dict or checkpoint), or from Python a state_dict.
        buffers: Policy for running statistics of BatchNorm, and other buffers (see `Buffers`); null refuses nets that
            have any.
        metrics: Further metrics of torchmetrics: class names, or class_path and init_args; as a list, or by name.

    Raises:
        UserError: If net, optimizer and parts do not fit, or two of them declare state or an upload of the same name.

    Attributes:
        net_buffers: The net's buffers; None if it has none.
        trained: Whether a run has trained the net.
    """

    trained: bool = False

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | None = None,
        optimizer: SGD | LocalOptimizer | None = None,
        ascent: Ascent | None = None,
        server_update: ServerUpdate | None = None,
        averaging: Averaging | None = None,
        parts: Sequence[Part] | None = None,
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
        complex = [n for n, x in (*net.named_parameters(), *net.named_buffers()) if x.is_complex()]
        remedy = "and training casts nets to real numbers; store torch.view_as_real of it"
        ensure(not complex, f"model.net = {type(net).__name__}: {', '.join(complex)} is complex, {remedy}")
        moving = moving_buffers(net)
        if moving and buffers is None:
            raise UserError(
                f"model.net has the buffer '{moving[0]}': choose how running statistics are treated by model.buffers = "
                "average, local or reset, or use GroupNorm; register a constant with persistent=False"
            )
        self.net_buffers = Buffers(net, buffers) if moving and buffers is not None else None
        lazy = any(isinstance(p, UninitializedParameter) for p in net.parameters())
        ensure(not lazy, f"model.net = {type(net).__name__} has lazy layers; give their numbers of inputs")
        self.flat = FlatSpec(net)
        for part in parts or ():
            name, slot = type(part).__name__, part.config_key
            ensure(slot == Part.config_key, f"{Part.config_key} = {name}: not in this list; set {slot} to it")
        self.parts = [part.bind(self.flat) for part in parts or ()]
        ensure(
            not self.optimizer.keeps_state or not self.trains_alone,
            "model.optimizer.state = keep: model.parts trains each client before the round, too; set it to reset",
        )
        names = [type(part).__name__ for part in self.parts if type(part).end_alone is not Part.end_alone]
        ensure(len(names) < 2, f"model.parts: {' and '.join(names)} both train clients by themselves; take one")

    def constructed(self, arguments: BoundArguments) -> None:
        """Checks that each name has one owner, once subclasses have declared their own."""
        super().constructed(arguments)
        for part in self.parts:
            part.attach(self)
        name = type(self).__name__
        owners = [(f"{owner.config_key} = {type(owner).__name__}", owner) for owner in self._owners]
        ensure(
            self.weighting in get_args(Weighting),
            f"{name}: weighting = {self.weighting!r}; give {' or '.join(get_args(Weighting))}",
        )
        local = [(label, [*owner.client_state, *owner.scratch_state]) for label, owner in owners]
        optimizer = f"model.optimizer = {type(self.optimizer).__name__}", self.optimizer.named_state
        others = {n: p for n, p in self.named_parameters() if p.requires_grad and not n.startswith("net.")}
        for path, parameter in others.items():
            remedy = "register it in the net as well, or set its requires_grad to False"
            warn(f"model.{path} stays as it is: only parameters of model.net are trained; {remedy}", stacklevel=2)
            parameter.requires_grad_(False)
        for path in unregistered(self.net):
            remedy = "hold it in a ModuleList, ParameterList or a dict of these, or set its requires_grad to False"
            warn(
                f"model.net.{path} stays as it is: torch finds no parameters in a list or dict; {remedy}", stacklevel=2
            )
        check_owners("client state", [("local training", ["start"]), *local, optimizer])
        check_owners("server state", [("the model", ["w"]), *((label, owner.server_state) for label, owner in owners)])
        check_owners("the upload", [("the context", ["k_lr"]), *((label, owner.up) for label, owner in owners)])
        check_owners("the log", [(label, owner.logs) for label, owner in owners])
        check_owners("the name", [(f"{label}.down", owner.down) for label, owner in owners])
        ensure("w" in self.down, f"{name}.down = {self.down}: lacks 'w', the model that clients start from; add it")

    # What engines and the trainer call: the hooks of the algorithm, then those of its parts

    def lr(self, ctx: RoundContext) -> float:
        """Returns the learning rate of a round's local steps."""
        return through((part.local_lr for part in self.all_parts), self.optimizer.lr_at(ctx.t, ctx.rounds), ctx)

    def begin_phase(self, server: State, ctx: RoundContext) -> State:
        """Returns what the clients receive in a phase."""
        hooks = (self.broadcast, *(part.broadcast for part in self.all_parts))
        return through(hooks, server, ctx).only(self.wire[0])

    def bits(self, values: Mapping[str, Tensor], up: bool) -> int:
        """Returns the bits that values take on the wire.

        Args:
            values: What one client receives or uploads, by name; nothing after training by itself.
            up: Whether it uploads it, encoded.
        """
        if not values:
            return 0
        values = values if up else self.encoded(values)
        bits: Mapping[str, Any] = {name: 8 * value.nbytes for name, value in values.items()}
        bits = through((part.bits for part in self.all_parts), bits, values, up)
        bits = {name: n for name, n in bits.items() if not (up and name in self.recalled)}
        return sum(bits.values())

    def begin_local(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Returns the weights where local training starts, and the client's state, with these weights as ``start``."""
        if part := self.alone(ctx):
            w = part.client_model(received.w, client)
            return w, client | {"start": w}
        seen = self.seen_state(received.w, client, received)[0] if self.sums_over_kept else client
        w, after = self.local_start(seen, received, ctx)
        client = client | {name: value for name, value in after.items() if value is not seen.get(name)}
        for part in self.all_parts:
            w, client = part.local_start(w, client, received, ctx)
        return w, client | {"start": w}

    def finish_local(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Returns what a client uploads after its last step, which ended at ``w``, and its state."""
        if part := self.alone(ctx):
            return {}, part.end_alone(w, client)
        client, received = self.seen_state(w, client, received)
        upload, client = self.local_end(w, client, received, ctx)
        for part in self.all_parts:
            upload, client = part.local_end(w, upload, client, received, ctx)
        return self.encoded(upload), client

    def finish_phase(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Returns the server's state after a phase."""
        uploads = through((part.decoded for part in self.parts), uploads, sent, self.models)
        server = self.server_step(server, sent, uploads, ctx)
        return through((part.phase_end for part in self.all_parts), server, uploads)

    def finish_client(self, client: State, server: State) -> State:
        """Returns what a client keeps after a phase.

        Args:
            client: Its state after local training.
            server: The server's state after its step.
        """
        return self.client_round_end(client, server).only(client)

    def finish_round(self, server: State, before: State, ctx: RoundContext) -> State:
        """Returns the server's state after a round that began with the state ``before``."""
        return through((part.round_end for part in self.all_parts), server, before, ctx)

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
            self,
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
        self.optimizer.check_batched("centralized training")
        state = {*self.client_inits(), *self.server_inits()} - {"buffers", *self.optimizer.named_state}
        if averaged and self.averaging is not None:
            state -= set(self.averaging.server_state)
        ensure(
            not (state or self.refers_to_received or self.parts),
            f"{type(self).__name__} keeps federated state ({', '.join(sorted(state)) or 'the received model'}): "
            "train it with `fl-lightning fit` or FederatedTrainer.fit, not centrally",
        )


class CentralizedOptimizer(torch.optim.Optimizer):
    """The local step of an objective without federated state, for automatic optimization.

    ``step(closure)`` evaluates the closure once for each gradient of the local step: once for SGD, twice for SAM.

    Args:
        objective: The algorithm, of which the hooks of a step run.
        context: Returns the context of a step for a learning rate.
        accumulated: Returns the number of batches whose gradients a step accumulates.
    """

    def __init__(
        self, objective: LocalObjective, context: Callable[[float], ClientContext], accumulated: Callable[[], int]
    ) -> None:
        super().__init__(objective.flat.parameters(objective.net), {"lr": objective.optimizer.lr})
        self.objective, self.context, self.accumulated = objective, context, accumulated

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]  # without one there is no gradient
        """Takes one local step.

        Args:
            closure: Zeroes the gradients (unless they are accumulated), evaluates the loss and runs backward.

        Returns:
            The closure's first value.

        Raises:
            UserError: If gradients are accumulated but the step needs one elsewhere than at the weights: those of
                earlier batches were taken at the weights.
        """
        objective, net, flat = self.objective, self.objective.net, self.objective.flat
        params: list[nn.Parameter] = self.param_groups[0]["params"]
        w, batches = flat.vector(net), self.accumulated()
        values: list[Any] = []

        def grad(v: Tensor, losses: Losses | None = None) -> Tensor:
            ensure(
                losses is None,
                "grad(v, losses): lightning.Trainer takes the gradient of training_step only; train with "
                "fl_lightning.FederatedTrainer",
            )
            ensure(
                batches == 1 or v is w,
                f"accumulate_grad_batches = {batches}: the local step takes a gradient at an ascent point, of one "
                "batch; set it to 1 and take a larger data.batch_size",
            )
            flat.load(net, v)
            with torch.enable_grad(), unchanged(net) if values else nullcontext():  # statistics: first pass only
                values.append(closure())
            return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])

        inits = {**objective.scratch_state, **objective.optimizer.named_state}
        state, ctx, received = self.state[params[0]], self.context(self.param_groups[0]["lr"]), State({"w": w})
        client = State(state.get("client") or State.initial(inits, w, w)) | {"start": w}
        lr = objective.step_lr(client, ctx)
        direction, client = objective.local_step(w, grad, client, received, ctx)
        w, client = objective.optimizer.take(w, direction, client, lr, ctx)
        state["client"] = dict(client.only(inits))
        flat.load(net, objective.after_step(w, client, received, ctx))
        return values[0]
