"""MobileNetV2 without batch statistics."""

from collections import OrderedDict

from torch import nn

from fl_lightning.core import weights
from fl_lightning.nets.resnet import group_norm


class MobileNetV2GN(nn.Sequential):
    """torchvision's MobileNetV2 (Sandler et al. 2018) with GroupNorm for BatchNorm, without dropout: for Landmarks.

    4,821,740 weights with 2,028 classes. How the papers' pre-trained network came by its GroupNorms is not known.

    Args:
        num_classes: Number of classes.
        groups: Groups of every GroupNorm. Google's trainer for Landmarks has 8, its model class 2; what the papers had
            is not known. It must divide 8.
        pretrained: Initial weights: ``torchvision`` for its ImageNet weights (downloaded once), or a file that holds
            such a state_dict. Convolutions, scales and shifts are taken over, the statistics of BatchNorm have no
            counterpart, and the classifier is if it has as many classes.

    Raises:
        UserError: If groups does not divide 8, or the pre-trained weights do not fit.
    """

    def __init__(self, num_classes: int = 2028, groups: int = 8, pretrained: str | None = None) -> None:
        from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

        net = mobilenet_v2(num_classes=num_classes, norm_layer=group_norm(groups, 8), dropout=0.0)
        super().__init__(OrderedDict(net=net))
        if pretrained is not None:
            key = "model.net.pretrained"
            ours = pretrained == "torchvision"
            found = MobileNet_V2_Weights.IMAGENET1K_V1.get_state_dict() if ours else weights.read(pretrained, key)
            weights.load(net, found, key, head="classifier.")
