"""Networks of the federated learning papers, as plain modules."""

from fl_lightning.nets.adapters import Frozen, LoRA
from fl_lightning.nets.bisenet import BiSeNetV2
from fl_lightning.nets.cnn import FLSAMCNN, LEAFCNN, DigitsCNN, DigitsMLP, FashionCNN, FullyConnected, HsuCNN
from fl_lightning.nets.resnet import MobileNetV2GN, PreActResNet18GN, ResNet8GN, ResNet18GN, ResNet18NoNorm
from fl_lightning.nets.text import LEAFLSTM, FastText, TextTransformer
from fl_lightning.nets.vit import ViTCIFAR

__all__ = [
    "FLSAMCNN",
    "LEAFCNN",
    "LEAFLSTM",
    "BiSeNetV2",
    "DigitsCNN",
    "DigitsMLP",
    "FashionCNN",
    "FastText",
    "Frozen",
    "FullyConnected",
    "HsuCNN",
    "LoRA",
    "MobileNetV2GN",
    "PreActResNet18GN",
    "ResNet8GN",
    "ResNet18GN",
    "ResNet18NoNorm",
    "TextTransformer",
    "ViTCIFAR",
]
