"""MobileNetV2 without batch statistics."""

from torch import Tensor, nn

from fl_lightning.core import Checked, Size, weights
from fl_lightning.nets.resnet import group_norm


class MobileNetV2GN(Checked, nn.Module, key="model.net"):
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
        UserError: If groups does not divide 8, or the pre-trained weights do not fit.
    """

    def __init__(self, num_classes: Size = 2028, groups: int = 8, pretrained: str | None = None) -> None:
        from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

        super().__init__()
        self.net = mobilenet_v2(num_classes=num_classes, norm_layer=group_norm(groups, 8), dropout=0.0)
        if pretrained is not None:
            key = "model.net.pretrained"
            ours = pretrained == "torchvision"
            found = MobileNet_V2_Weights.IMAGENET1K_V1.get_state_dict() if ours else weights.read(pretrained, key)
            weights.load(self.net, found, key, head="classifier.")

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, 3, H, W)``."""
        return self.net(x)
