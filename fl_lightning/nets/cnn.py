"""Small networks, with PyTorch's default initialization.

ReLU comes after max-pooling throughout: the two commute, and fewer values are rectified.
"""

from itertools import pairwise

from torch import nn

from fl_lightning.core import Checked, Size


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
