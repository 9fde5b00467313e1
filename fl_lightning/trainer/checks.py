"""Checks before the first round: net, loss and data fit together."""

import re
from collections.abc import Mapping
from functools import partial
from inspect import signature

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import check_owners
from fl_lightning.core import Inputs, UserError, ensure, folded, generator, map_tensors, named_tensors, variance_needed
from fl_lightning.trainer.run import Run

MISFIT = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)
"""Errors that a net or a loss raises on input of the wrong shape or type."""


def check_fit(run: Run) -> None:
    """Passes one batch through net and loss.

    Raises:
        UserError: If the net does not take the data's samples or has another number of classes, the loss does not give
            one value per sample, BatchNorm would get a batch of one sample, or a callback does not suit the run.
    """
    objective, data, evaluator, fits = run.objective, run.data, run.evaluator, False
    net = type(objective.net).__name__
    suits = data.task.by_class or not objective.needs_classes
    ensure(suits, f"model = {type(objective).__name__}: for classes, these targets are none; choose another algorithm")
    x, y = next(iter(data.eval_batches("test", run.dtype)))
    try:
        logits = evaluator.logits(run.server.w, x)
        if isinstance(data.x_train, Tensor) and data.x_train.dtype == torch.int64:  # the largest token
            batch, row = x, data.x_train.flatten(1).amax(1).argmax()[None]
            x, _ = next(iter(data.eval_batches(row, run.dtype)))
            evaluator.logits(run.server.w, x)
            x = batch
        what = f"{type(logits).__name__}; its forward must return one tensor, the logits"
        ensure(isinstance(logits, Tensor), f"model.net = {net} returns a {what}")
        fits = data.task.fit(logits, y, data.num_classes)
    except UserError:
        raise
    except MISFIT as error:
        shape = map_tensors(lambda v: tuple(v.shape), x)
        tokens = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.bool)
        remedy = "choose a net for this data" + ", or give images as uint8 or float: whole numbers are tokens" * tokens
        raise UserError(
            f"model.net = {net} cannot take a batch of shape {shape} ({_first_line(error)}); {_remedy(error, remedy)}"
        ) from None
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [n for n, each in objective.net.named_modules() if isinstance(each, embeddings) and each.sparse]
    ensure(not sparse, f"model.net = {net}: {', '.join(sparse)} has sparse gradients; set its sparse to false")
    _check_in_place(run, x)
    policy = objective.net_buffers.policy if objective.net_buffers else None
    if evaluator.by_batch or policy == "reset":
        kind, n = ("test", len(data.y_test)) if evaluator.by_batch else ("training", int(data.client_sizes.sum()))
        least = n % data.eval_batch_size or data.eval_batch_size
        of_source, _ = next(iter(data.eval_batches("test" if evaluator.by_batch else "train", run.dtype)))
        with variance_needed(
            f"data.eval_batch_size = {data.eval_batch_size} leaves a batch of one {kind} sample, in which BatchNorm "
            f"has no variance, and model.buffers = {policy} evaluates by its statistics; choose another size, such as 8"
        ):
            evaluator.logits(run.server.w, map_tensors(lambda v: v[:least], of_source), by_batch=True)
    remedy = f"set its num_classes to {data.num_classes}"
    if logits.ndim != y.ndim + data.task.by_class or "num_classes" not in signature(type(objective.net)).parameters:
        remedy = f"it must give {(len(y), data.num_classes, *y.shape[1:]) if data.task.by_class else tuple(y.shape)}"
    if (
        data.task.by_class
        and logits.ndim == y.ndim + 1
        and logits.shape[1] == data.num_classes - 1
        and 0 not in data.y_train
    ):
        remedy += ", or number the classes from 0: no sample has class 0"
    ensure(
        fits,
        f"model.net = {net} gives outputs of shape {tuple(logits.shape)} for {data.num_classes} {data.task.unit}; "
        f"{remedy}",
    )
    if data.task.by_class and logits.shape[1] > data.num_classes:
        more, meant = logits.shape[1], f"give it {data.num_classes}, or set data.num_classes"
        text = f"model.net = {net} has {more} outputs for {data.num_classes} classes; {meant} = {more} if all are meant"
        rank_zero_warn(text, stacklevel=4)
    _check_loss(run, logits, y)
    if objective.metrics:
        scores = objective.scores(data).to(run.fabric.device)
        scores.update(logits, y)
        scores.compute()
    # with Mixup the labels are probabilities
    x, y = next(iter(data.client_batches(0, 1, 1, generator(run.seed, "check"), run.dtype)))
    _check_loss(run, evaluator.logits(run.server.w, map_tensors(lambda v: v[:2], x)), y[:2])
    if data.val_fraction:
        objective.check_global_model(f"data.val_fraction = {data.val_fraction}, which must be 0")
    for callback in run.callbacks:
        callback.check(run)


def _check_in_place(run: Run, x: Inputs) -> None:
    """Checks that the net's forward changes neither its weights, which are the server's, nor its input."""
    net, few = run.objective.net, map_tensors(lambda v: v[:2].clone(), x)
    versions = [p._version for p in net.parameters()]
    run.evaluator.logits(run.server.w, few)
    ensure(
        versions == [p._version for p in net.parameters()],
        f"model.net = {type(net).__name__} changes its own weights in forward, as nn.Embedding(max_norm=...) does; "
        "they are the server's, too: leave it out",
    )
    once = named_tensors(map_tensors(torch.clone, few), "")
    run.evaluator.logits(run.server.w, few)
    ensure(
        all(torch.equal(v, once[name]) for name, v in named_tensors(few, "").items()),
        f"model.net = {type(net).__name__} changes its input in place, which a step of SAM uses twice; compute new "
        "tensors, as x - 1 in place of x.sub_(1)",
    )


def check_aggregation(run: Run) -> None:
    """Checks the rule that combines the uploads of a cohort, before its first round.

    Raises:
        UserError: If processes, cohort or algorithm do not fit it.
    """
    rule, settings, objective = run.aggregation, run.settings, run.objective
    ensure(
        settings.asynchronous is None or not objective.needs_rounds,
        f"trainer.asynchronous = {type(settings.asynchronous).__name__}: {type(objective).__name__} needs rounds, "
        f"{objective.needs_rounds}; choose another algorithm, or rounds with trainer.clock.deadline_s",
    )
    m = run.data.num_clients - getattr(settings.sampler, "held_out", 0)
    at_once, buffer = (getattr(settings.asynchronous, name, None) for name in ("concurrency", "buffer"))
    ensure(
        at_once is None or at_once <= m,
        f"trainer.asynchronous.concurrency = {at_once}: only {m} of the clients take part; give at most {m}",
    )
    check_owners("server state", [("model", objective.server_inits()), ("trainer.aggregation", rule.server_state)])
    ensure(
        settings.deterministic or run.fabric.world_size == 1 or not rule.by_rows,
        f"trainer.deterministic = false: {type(rule).__name__} needs all uploads in one process; set it to true",
    )
    if not rule.by_rows or run.rounds_done:
        return
    rule.check(buffer or settings.wanted or len(settings.sampler(0, run.data.num_clients, run.seed)))
    rule.check_round()
    for phase in range(objective.phases) if rule.empty else ():
        ctx = run.round_context(0, phase)
        sent = objective.begin_phase(run.server, ctx)
        known, like = objective.known(sent), run.server.w
        uploads = rule.uploads(objective, (), ctx, like)
        uploads.change(partial(_zeros, rule.shapes({}, known), like))
        objective.finish_phase(run.server, sent, uploads, ctx)


def _first_line(error: Exception) -> str:
    return folded((str(error) or type(error).__name__).splitlines()[0], 150)


def _remedy(error: Exception, otherwise: str) -> str:
    """Returns what helps where torch lacks an operation in a precision, else what helps in general."""
    lacking = re.search("not implemented for '(BFloat16|Double)'", str(error))
    return "torch has it not in this trainer.precision; set that to 32-true" if lacking else otherwise


def _zeros(shapes: Mapping[str, list[int]], like: Tensor, name: str, _: object) -> Tensor:
    return like.new_zeros(2, *shapes[name])


def _check_loss(run: Run, logits: Tensor, y: Tensor) -> None:
    loss, task = type(run.objective.loss).__name__, run.data.task
    wrong = not task.by_class and isinstance(run.objective.loss, nn.CrossEntropyLoss)  # takes y for probabilities
    ensure(not wrong, f"model.loss = {loss}: for classes, these targets are none; choose a loss {task.remedy}")
    try:
        shape = tuple(run.objective.loss(logits, y).shape)
    except MISFIT as error:
        raise UserError(
            f"model.loss = {loss} cannot take logits {tuple(logits.shape)} and labels {tuple(y.shape)} "
            f"({_first_line(error)}); {_remedy(error, f'choose a loss {run.data.task.remedy}')}"
        ) from None
    ensure(
        shape == (len(y),),
        f"model.loss = {loss} gives a value of shape {shape}; it must give one loss per sample, {(len(y),)}",
    )
