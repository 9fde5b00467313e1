"""Mean intersection over union."""

from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning.core import enlarged

IGNORED = 255
"""Class of pixels that do not count."""


class MeanIoU(MulticlassConfusionMatrix):
    """Intersection over union of all pixels that count, averaged over the classes that occur (as in FedDrive)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, ignore_index=IGNORED, validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds logits ``(n, C, h, w)``, enlarged if necessary, and label maps ``(n, H, W)``."""
        super().update(enlarged(preds, target).argmax(1), target)

    def compute(self) -> Tensor:
        """Returns the mean, a scalar."""
        counts: Tensor = super().compute().double()
        true, found = counts.sum(1), counts.sum(0)
        return (counts.diag() / (true + found - counts.diag()))[true > 0].mean()
