"""Loss terms and pixel losses, per sample: ``(n,)``."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.core.errors import require
from fl_lightning.core.forms import Interval
from fl_lightning.core.options import Checked


def kl_to_teacher(logits: Tensor, teacher: Tensor, tau: float = 1.0, tau2: bool = True) -> Tensor:
    """Returns ``KL(softmax(teacher/tau) || softmax(logits/tau))`` of each sample (FedGMT Eq. 9).

    Args:
        logits: The student's, ``(n, C)``.
        teacher: The teacher's, ``(n, C)``.
        tau: Temperature.
        tau2: Multiply by ``tau^2``, as the official code does; the paper does not.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)  # autocast on a CPU would stay in bfloat16
    student, target = (F.log_softmax(z.to(wide) / tau, dim=-1) for z in (logits, teacher))
    kl = F.kl_div(student, target, reduction="none", log_target=True).sum(-1)
    return tau * tau * kl if tau2 else kl


def not_true(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the logits of all classes except the true one, ``(n, C)`` to ``(n, C - 1)`` (FedNTD).

    Raises:
        UserError: If a sample has probabilities in place of one class.
    """
    require(not target.is_floating_point(), "data.augment.mixup", "on", "use 0, FedNTD needs one true class a sample")
    others = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, others + (others >= target.unsqueeze(-1)))


class PixelCrossEntropy(Checked, nn.Module, key="model.loss"):
    """Cross-entropy for segmentation: the mean over the pixels of each image.

    If the net returns a tuple (in training), the losses of all outputs are added. Outputs smaller than the label map
    are enlarged to it (bilinear).

    Args:
        hardest: Fraction of an image's pixels that count, those with the largest loss (FedDrive: 0.25); null: all.
        ignore_index: Label of pixels that do not count; among the hardest their loss is 0.

    Raises:
        UserError: If ``hardest`` is out of range.
    """

    def __init__(self, hardest: Annotated[float, Interval("(0, 1]")] | None = None, ignore_index: int = 255) -> None:
        super().__init__()
        self.hardest, self.ignore_index = hardest, ignore_index

    def forward(self, logits: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Returns losses ``(n,)`` of logits ``(n, C, H, W)``, or a tuple of them, and label maps ``(n, H, W)``."""
        if isinstance(logits, Tensor):
            return self._of(logits, target)
        return torch.stack([self._of(output, target) for output in logits]).sum(0)

    def _of(self, logits: Tensor, target: Tensor) -> Tensor:
        pixels = F.cross_entropy(enlarged(logits, target), target, ignore_index=self.ignore_index, reduction="none")
        pixels = pixels.flatten(1)
        if self.hardest is not None:
            return pixels.topk(max(1, int(self.hardest * pixels.shape[1])), dim=1).values.mean(1)
        return pixels.sum(1) / (target != self.ignore_index).flatten(1).sum(1).clamp(min=1)


def enlarged(logits: Tensor, target: Tensor) -> Tensor:
    """Returns logits ``(n, C, h, w)`` interpolated bilinearly to the size of label maps ``(n, H, W)``."""
    size = target.shape[-2:]
    return logits if logits.shape[-2:] == size else F.interpolate(logits, size=size, mode="bilinear")
