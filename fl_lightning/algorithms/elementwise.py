"""Averages elementwise losses (MSE, BCE, ...) over the values of each sample."""

from typing import Any

from torch import Tensor, nn

LOSSES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss, nn.PoissonNLLLoss,
)  # fmt: skip


def applies_to(loss: nn.Module) -> bool:
    """Returns whether a loss is elementwise: one value for each value of a target."""
    return isinstance(loss, LOSSES)


def average(loss: nn.Module) -> None:
    """Makes an elementwise loss without reduction return one mean per sample, ``(n,)``; leaves other losses alone."""
    if applies_to(loss) and not getattr(loss, "per_sample", False):
        loss.register_forward_pre_hook(_check)
        loss.register_forward_hook(_mean)
        vars(loss)["per_sample"] = True


def _check(loss: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    outputs, targets = inputs
    if outputs.shape != targets.shape:  # torch broadcasts them to each other
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}")


def _mean(loss: nn.Module, inputs: Any, values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
