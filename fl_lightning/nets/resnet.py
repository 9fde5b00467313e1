"""ResNet-18 without batch statistics."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn

from fl_lightning.errors import UserError


class ResNet18GN(nn.Module):
    """torchvision's ResNet-18 (He et al. 2016) with GroupNorm for BatchNorm.

    11,173,962 weights with 10 classes and the CIFAR stem; 11,181,642 with the ImageNet stem (FedSMOO, FedLESAM), and
    11,227,812 with 100 classes.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm; the public codes use 2. It must divide 64.
        stem: ``cifar``: 3x3 convolution of stride 1, no pooling; ``imagenet``: 7x7 of stride 2 and max-pooling.

    Raises:
        UserError: If groups does not divide 64.
    """

    def __init__(self, num_classes: int = 10, groups: int = 2, stem: Literal["cifar", "imagenet"] = "cifar") -> None:
        from torchvision.models import resnet18

        super().__init__()
        if groups < 1 or 64 % groups:
            raise UserError(f"model.net.groups = {groups} does not divide 64 channels; use 1, 2, 4, 8, 16, 32 or 64")
        self.net = resnet18(num_classes=num_classes, norm_layer=partial(nn.GroupNorm, groups))
        if stem == "cifar":
            self.net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(self.net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
            self.net.maxpool = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, num_classes)`` of images ``(N, 3, H, W)``."""
        logits: Tensor = self.net(x)
        return logits
