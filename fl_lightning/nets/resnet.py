"""Residual networks, among them MobileNetV2, without batch statistics."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, hub, nn

from fl_lightning.core import Checked, Size, UserError, require, weights

Norm = Callable[[int], nn.Module]
"""Returns a normalization layer for a number of channels."""


def group_norm(groups: int, channels: int) -> Norm:
    """Returns GroupNorm with this number of groups.

    Args:
        groups: Groups of every layer.
        channels: A divisor of the channels of every layer.

    Raises:
        UserError: If groups does not divide ``channels``.
    """
    fits = [g for g in range(1, channels + 1) if channels % g == 0]
    require(
        groups in fits,
        "model.net.groups",
        groups,
        f"must divide {channels} channels; use {', '.join(map(str, fits))}",
    )
    return partial(nn.GroupNorm, groups)


def _cifar_stem() -> nn.Conv2d:
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
    return stem


class _TorchvisionNet(Checked, nn.Module, key="model.net"):
    """A net of torchvision, as ``net``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, 3, H, W)``."""
        return self.net(x)


def _resnet(blocks: list[int], num_classes: int, norm: Norm) -> nn.Module:
    """Returns torchvision's ResNet of basic blocks."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, blocks, num_classes, norm_layer=norm)


class ResNet18GN(_TorchvisionNet):
    """torchvision's ResNet-18 (He et al. 2016) with GroupNorm instead of BatchNorm.

    11,173,962 weights with 10 classes and the CIFAR stem; 11,181,642 with the ImageNet stem (FedSMOO, FedLESAM), and
    11,227,812 with 100 classes.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm; the public codes use 2. It must divide 64.
        stem: ``cifar``: 3x3 convolution of stride 1, no pooling; ``imagenet``: 7x7 of stride 2 and max-pooling.

    Raises:
        UserError: If groups does not divide 64.
    """

    def __init__(self, num_classes: Size = 10, groups: int = 2, stem: Literal["cifar", "imagenet"] = "cifar") -> None:
        super().__init__(_resnet([2, 2, 2, 2], num_classes, group_norm(groups, 64)))
        if stem == "cifar":
            self.net.conv1, self.net.maxpool = _cifar_stem(), nn.Identity()


class ResNet18NoNorm(_TorchvisionNet):
    """ResNet-18 with the CIFAR stem and no normalization, as in FedGF (App. D.6, CIFAR-100).

    11,210,532 weights with 100 classes. Convolutions without bias, PyTorch's default initialization.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 100) -> None:
        super().__init__(_resnet([2, 2, 2, 2], num_classes, nn.Identity))
        self.net.conv1, self.net.maxpool = _cifar_stem(), nn.Identity()
        for conv in (module for module in self.modules() if isinstance(module, nn.Conv2d)):
            conv.reset_parameters()


class ResNet8GN(_TorchvisionNet):
    """FedGMT's small ResNet for CIFAR-100: torchvision's first three stages, of one block each.

    ImageNet stem; 64, 128 and 256 channels, strides 1, 2, 2; torchvision's initialization. 1,258,404 weights with 100
    classes.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm; it must divide 64.

    Raises:
        UserError: If groups does not divide 64.
    """

    def __init__(self, num_classes: Size = 100, groups: int = 2) -> None:
        super().__init__(_resnet([1, 1, 1, 1], num_classes, group_norm(groups, 64)))
        self.net.layer4, self.net.fc = nn.Identity(), nn.Linear(256, num_classes)


class MobileNetV2GN(_TorchvisionNet):
    """torchvision's MobileNetV2 (Sandler et al. 2018) with GroupNorm instead of BatchNorm, no dropout: for Landmarks.

    4,821,740 weights with 2,028 classes. The origin of the GroupNorms in the papers' pre-trained network is unknown.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm; must divide 8. Google's trainer for Landmarks uses 8, its model class 2; the
            papers' number is unknown.
        pretrained: Initial weights: ``torchvision`` for its ImageNet weights (downloaded once), or a file with such a
            state_dict. Convolutions, scales and shifts load; the classifier loads if it has as many classes; the
            statistics of BatchNorm do not.

    Raises:
        UserError: If groups does not divide 8, or the pre-trained weights do not fit or cannot be downloaded.
    """

    def __init__(self, num_classes: Size = 2028, groups: int = 8, pretrained: str | None = None) -> None:
        from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

        super().__init__(mobilenet_v2(num_classes=num_classes, norm_layer=group_norm(groups, 8), dropout=0.0))
        if pretrained is not None:
            key, source = "model.net.pretrained", MobileNet_V2_Weights.IMAGENET1K_V1
            try:
                found = source.get_state_dict() if pretrained == "torchvision" else weights.read(pretrained, key)
            except OSError as error:
                raise UserError(
                    f"{key} = torchvision: {source.url} cannot be downloaded ({error}); put the file into"
                    f" {hub.get_dir()}/checkpoints, or give its path"
                ) from None
            weights.load(self.net, found, key, head="classifier.")


class PreActResNet18GN(Checked, nn.Module, key="model.net"):
    """Pre-activation ResNet-18 (He et al. 2016b) of TensorFlow Federated's CIFAR-100 task (Reddi et al. 2021, PAM).

    7x7 stem of stride 2 and max-pooling, then no stride between the stages. 11,227,812 weights with 100 classes. For
    images of 24x24 pixels.

    Differences: padding is symmetric (Keras pads an even size by one more pixel at the far edge); epsilon of the
    GroupNorms is torch's; the initialization is not truncated. Whether ECCV 2022 used this variant is unknown.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm; 2 at the time of the papers. It must divide 64.

    Raises:
        UserError: If groups does not divide 64.
    """

    def __init__(self, num_classes: Size = 100, groups: int = 2) -> None:
        super().__init__()
        norm, channels = group_norm(groups, 64), [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        self.blocks = nn.Sequential(
            *(_PreActBlock(channels[i], channels[i + 1], norm, first=i == 0) for i in range(len(channels) - 1))
        )
        self.norm, self.fc = norm(512), nn.Linear(512, num_classes)
        for conv in (module for module in self.modules() if isinstance(module, nn.Conv2d)):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, 3, H, W)``."""
        x = self.norm(self.blocks(self.stem(x))).relu()
        return self.fc(x.mean((2, 3)))


class _PreActBlock(nn.Module):
    """Norm, ReLU and convolution, twice; the first block follows a norm and a ReLU."""

    def __init__(self, channels: int, out: int, norm: Norm, first: bool) -> None:
        super().__init__()
        before = [] if first else [norm(channels), nn.ReLU()]
        self.residual = nn.Sequential(
            *before,
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            norm(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
        )
        self.shortcut = (
            nn.Identity() if channels == out else nn.Sequential(nn.Conv2d(channels, out, 1, bias=False), norm(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.residual(x)
