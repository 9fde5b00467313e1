"""BiSeNetV2: real-time segmentation of street scenes."""

from collections import OrderedDict
from itertools import accumulate

import torch
from torch import Tensor, nn

from fl_lightning.core import Checked, Size, ensure, weights


class BiSeNetV2(Checked, nn.Module, key="model.net"):
    """BiSeNetV2 (Yu et al. 2021) as in FedDrive, for Cityscapes and IDDA.

    8,196,416 weights with 19 classes, 4,585,552 without the auxiliary heads. Height and width of images must be
    divisible by 32. Parameters have the names of FedDrive's (and CoinCheung's) code, so that its pre-trained backbone
    loads. It has running statistics of BatchNorm.

    Args:
        num_classes: Number of classes.
        auxiliary: Four more heads in training, on the semantic branch at 1/4, 1/8, 1/16 and 1/32 of the size.
        pretrained: A file of weights by part and name, ``{"detail": {...}, "segment": {...}, ...}``, such as
            CoinCheung's ``backbone_v2.pth``; other parts are initialized at random.

    Raises:
        UserError: If the pre-trained weights do not fit.
    """

    def __init__(self, num_classes: Size = 19, auxiliary: bool = True, pretrained: str | None = None) -> None:
        super().__init__()
        self.detail = _named(
            S1=nn.Sequential(ConvBNReLU(3, 64, stride=2), ConvBNReLU(64, 64)),
            S2=nn.Sequential(ConvBNReLU(64, 64, stride=2), ConvBNReLU(64, 64), ConvBNReLU(64, 64)),
            S3=nn.Sequential(ConvBNReLU(64, 128, stride=2), ConvBNReLU(128, 128), ConvBNReLU(128, 128)),
        )
        self.segment = _named(
            S1S2=Stem(),
            S3=nn.Sequential(Expansion(16, 32, stride=2), Expansion(32, 32)),
            S4=nn.Sequential(Expansion(32, 64, stride=2), Expansion(64, 64)),
            S5_4=nn.Sequential(Expansion(64, 128, stride=2), *(Expansion(128, 128) for _ in range(3))),
            S5_5=Context(),
        )
        self.bga, self.head = Aggregation(), _head(128, 1024, num_classes, up=8)
        sizes = {"aux2": (16, 4), "aux3": (32, 8), "aux4": (64, 16), "aux5_4": (128, 32)}
        self.auxiliary = list(sizes) if auxiliary else []
        for name in self.auxiliary:
            channels, up = sizes[name]
            self.add_module(name, _head(channels, 128, num_classes, up))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Expansion):
                nn.init.zeros_(module.get_parameter("conv2.1.weight"))  # a layer starts as its shortcut
        if pretrained is not None:
            key, parts = "model.net.pretrained", dict(self.named_children())
            states = weights.read(pretrained, key)
            ensure(
                isinstance(states, dict) and bool(states) and states.keys() <= parts.keys(),
                f"{key} = {pretrained}: no weights of a backbone by part; the parts are {', '.join(parts)}",
            )
            for name, state in states.items():
                weights.load(parts[name], state, key)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Returns logits ``(N, num_classes, H, W)`` of images ``(N, 3, H, W)``; with auxiliary ones in training."""
        semantic = [*accumulate(self.segment, lambda y, stage: stage(y), initial=x)]
        logits: Tensor = self.head(self.bga(self.detail(x), semantic[-1]))
        if not (self.training and self.auxiliary):
            return logits
        heads = map(self.get_submodule, self.auxiliary)
        return (logits, *(head(y) for head, y in zip(heads, semantic[1:], strict=False)))


def _named(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _conv_bn(channels: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Returns a convolution that keeps the size (up to its stride), and BatchNorm."""
    return [nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)]


class ConvBNReLU(nn.Sequential):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        conv, bn = _conv_bn(channels, out, kernel, stride)
        super().__init__(OrderedDict(conv=conv, bn=bn, relu=nn.ReLU()))


class Stem(nn.Module):
    """Reduces to a quarter of the size and 16 channels, by convolution and by pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ConvBNReLU(3, 16, stride=2)
        self.left = nn.Sequential(ConvBNReLU(16, 8, kernel=1), ConvBNReLU(8, 16, stride=2))
        self.right, self.fuse = nn.MaxPool2d(3, stride=2, padding=1), ConvBNReLU(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fuse(torch.cat([self.left(x), self.right(x)], 1))


class Expansion(nn.Module):
    """Gather-and-expansion layer: depthwise convolutions on six times the channels, with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        wide = 6 * channels
        self.conv1 = ConvBNReLU(channels, channels)
        if stride == 1:
            self.dwconv = nn.Sequential(*_conv_bn(channels, wide, groups=channels), nn.ReLU())
        else:
            self.dwconv1 = nn.Sequential(*_conv_bn(channels, wide, stride=stride, groups=channels))
            self.dwconv2 = nn.Sequential(*_conv_bn(wide, wide, groups=wide), nn.ReLU())
            self.shortcut = nn.Sequential(
                *_conv_bn(channels, channels, stride=stride, groups=channels), *_conv_bn(channels, out, kernel=1)
            )
        self.conv2 = nn.Sequential(*_conv_bn(wide, out, kernel=1))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        y = self.dwconv(y) if self.stride == 1 else self.dwconv2(self.dwconv1(y))
        return torch.relu(self.conv2(y) + (x if self.stride == 1 else self.shortcut(x)))


class Context(nn.Module):
    """Context embedding: the mean over the image is added everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(128)
        self.conv_gap, self.conv_last = ConvBNReLU(128, 128, kernel=1), ConvBNReLU(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_last(x + self.conv_gap(self.bn(x.mean((2, 3), keepdim=True))))


class Aggregation(nn.Module):
    """Guided aggregation: each branch is weighted by the other, at the size of either; the sum is at 1/8."""

    def __init__(self) -> None:
        super().__init__()
        self.left1 = nn.Sequential(*_conv_bn(128, 128, groups=128), nn.Conv2d(128, 128, 1, bias=False))
        self.left2 = nn.Sequential(*_conv_bn(128, 128, stride=2), nn.AvgPool2d(3, stride=2, padding=1))
        self.right1 = nn.Sequential(*_conv_bn(128, 128))
        self.right2 = nn.Sequential(*_conv_bn(128, 128, groups=128), nn.Conv2d(128, 128, 1, bias=False))
        self.up = nn.Upsample(scale_factor=4, mode="bilinear", align_corners=True)
        self.conv = nn.Sequential(*_conv_bn(128, 128), nn.ReLU())

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        fine = self.left1(detail) * self.up(self.right1(semantic)).sigmoid()
        coarse = self.left2(detail) * self.right2(semantic).sigmoid()
        return self.conv(fine + self.up(coarse))


def _head(channels: int, middle: int, num_classes: int, up: int) -> nn.Sequential:
    """Returns a head: logits of all classes, enlarged by ``up``."""
    return _named(
        conv=ConvBNReLU(channels, middle),
        drop=nn.Dropout(0.1),
        conv_out=nn.Sequential(nn.Conv2d(middle, num_classes * up**2, 1), nn.PixelShuffle(up)),
    )
