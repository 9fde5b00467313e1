"""Networks of the federated learning papers, as plain modules."""

from fl_lightning.nets.cnn import FLSAMCNN, DigitsCNN, DigitsMLP, HsuCNN
from fl_lightning.nets.resnet import ResNet18GN

__all__ = ["FLSAMCNN", "DigitsCNN", "DigitsMLP", "HsuCNN", "ResNet18GN"]
