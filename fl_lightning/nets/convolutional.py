"""Convolutional networks: small ones with PyTorch's default initialization, and residual ones without batch statistics.

In the small ones ReLU comes after max-pooling: the two commute, and fewer values are rectified.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, hub, nn

from fl_lightning.core import Checked, Size, UserError, require, weights


class FullyConnected(Checked, nn.Sequential, key="model.net"):
    """Fully connected layers with ReLU between them. By default the 2NN of McMahan et al. 2017, 199,210 weights.

    Args:
        in_features: Number of values of a sample of any shape.
        hidden: Widths of the hidden layers.
        num_classes: Number of classes.
    """

    def __init__(self, in_features: Size = 784, hidden: tuple[Size, ...] = (200, 200), num_classes: Size = 10) -> None:
        widths = (in_features, *hidden)
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(nn.Flatten(), *layers, nn.Linear(widths[-1], num_classes))


class DigitsMLP(FullyConnected):
    """64 - hidden - classes, ReLU; for 8x8 digits. 4,810 weights by default.

    Args:
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
    """

    def __init__(self, hidden: Size = 64, num_classes: Size = 10) -> None:
        super().__init__(64, (hidden,), num_classes)


class DigitsCNN(Checked, nn.Sequential, key="model.net"):
    """Two 3x3 convolutions (8 and 16 channels), each with pooling, and a linear layer; for 1x8x8 digits. 1,898 weights.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 10) -> None:
        super().__init__(
            *_block(1, 8, kernel=3, padding=1),
            *_block(8, 16, kernel=3, padding=1),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )


class FashionCNN(Checked, nn.Sequential, key="model.net"):
    """Two unpadded 5x5 convolutions (16 and 32 channels) with stride 2, and a linear layer; for 1x28x28 images.

    18,378 weights. Strides in place of pooling make a step four times as fast on a CPU.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )


class HsuCNN(Checked, nn.Sequential, key="model.net"):
    """LeNet-like network for 32x32 images of Hsu et al. 2019, used by FedSAM, FedGloSS and FedGF.

    Two unpadded 5x5 convolutions of 64 channels, then 384 - 192 - classes. 797,962 weights with 10 classes, 815,332
    with 100.

    Args:
        num_classes: Number of classes.
        in_channels: Color channels of the images.
    """

    def __init__(self, num_classes: Size = 10, in_channels: Size = 3) -> None:
        super().__init__(
            *_block(in_channels, 64, kernel=5),
            *_block(64, 64, kernel=5),
            nn.Flatten(),
            nn.Linear(1600, 384),
            nn.ReLU(),
            nn.Linear(384, 192),
            nn.ReLU(),
            nn.Linear(192, num_classes),
        )


class FLSAMCNN(Checked, nn.Sequential, key="model.net"):
    """The CNN of McMahan et al. 2017 for 3x32x32 images, as in the FL-SAM code (FedGMT).

    Two padded 5x5 convolutions of 32 and 64 channels, then 512 - classes. 2,156,490 weights with 10 classes.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 10) -> None:
        super().__init__(
            *_block(3, 32, kernel=5, padding=2),
            *_block(32, 64, kernel=5, padding=2),
            nn.Flatten(),
            nn.Linear(4096, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )


class LEAFCNN(Checked, nn.Sequential, key="model.net"):
    """LEAF's CNN for FEMNIST, 1x28x28 images (Caldas et al. 2018).

    Two padded 5x5 convolutions of 32 and 64 channels, then 2,048 - classes. 6,603,710 weights with 62 classes.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 62) -> None:
        super().__init__(
            *_block(1, 32, kernel=5, padding=2),
            *_block(32, 64, kernel=5, padding=2),
            nn.Flatten(),
            nn.Linear(3136, 2048),
            nn.ReLU(),
            nn.Linear(2048, num_classes),
        )


def _block(channels: int, out: int, kernel: int, padding: int = 0) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()


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


class _TorchvisionNet(Checked, nn.Module, key="model.net"):
    """A net of torchvision, as ``net``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, 3, H, W)``."""
        return self.net(x)


def _resnet(blocks: list[int], num_classes: int, norm: Norm, stem: str) -> nn.Module:
    """Returns torchvision's ResNet of basic blocks, with its own stem or that for CIFAR, of stride 1."""
    from torchvision.models.resnet import BasicBlock, ResNet

    net = ResNet(BasicBlock, blocks, num_classes, norm_layer=norm)
    if stem == "cifar":
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
    return net


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
        super().__init__(_resnet([2, 2, 2, 2], num_classes, group_norm(groups, 64), stem))


class ResNet18NoNorm(_TorchvisionNet):
    """ResNet-18 with the CIFAR stem and no normalization, as in FedGF (App. D.6, CIFAR-100).

    11,210,532 weights with 100 classes. Convolutions without bias, PyTorch's default initialization.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: Size = 100) -> None:
        super().__init__(_resnet([2, 2, 2, 2], num_classes, nn.Identity, "cifar"))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()


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
        super().__init__(_resnet([1, 1, 1, 1], num_classes, group_norm(groups, 64), "imagenet"))
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
                state = source.get_state_dict() if pretrained == "torchvision" else weights.read(pretrained, key)
            except OSError as error:
                raise UserError(
                    f"{key} = torchvision: {source.url} cannot be downloaded ({error}); put the file into"
                    f" {hub.get_dir()}/checkpoints, or give its path"
                ) from None
            weights.load(self.net, state, key, head="classifier.")


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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
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
        preactivation = [] if first else [norm(channels), nn.ReLU()]
        self.residual = nn.Sequential(
            *preactivation,
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
