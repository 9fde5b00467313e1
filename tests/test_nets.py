import pickle

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import UserError
from fl_lightning.nets import FLSAMCNN, DigitsCNN, DigitsMLP, HsuCNN, ResNet18GN


@pytest.mark.parametrize(
    ("make", "shape", "classes", "weights"),
    [
        (DigitsMLP, (1, 8, 8), 10, 4_810),
        (DigitsCNN, (1, 8, 8), 10, 1_898),
        (HsuCNN, (3, 32, 32), 10, 797_962),
        (lambda: HsuCNN(100), (3, 32, 32), 100, 815_332),
        (lambda: HsuCNN(10, in_channels=1), (1, 32, 32), 10, 794_762),
        (FLSAMCNN, (3, 32, 32), 10, 2_156_490),
        (ResNet18GN, (3, 32, 32), 10, 11_173_962),
        (lambda: ResNet18GN(stem="imagenet"), (3, 32, 32), 10, 11_181_642),
        (lambda: ResNet18GN(100, stem="imagenet"), (3, 32, 32), 100, 11_227_812),
    ],
)
def test_shapes_and_weight_counts(make, shape, classes, weights):
    net = make()
    assert sum(p.numel() for p in net.parameters()) == weights
    with torch.no_grad():
        assert net(torch.zeros(2, *shape)).shape == (2, classes)
    assert not list(net.buffers())  # no batch statistics


def test_hsu_cnn_is_the_published_network():
    """Same function with ReLU before pooling, as the papers draw it."""
    net = HsuCNN().double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (w1, b1), (w2, b2), *linear = [(m.weight, m.bias) for m in net if hasattr(m, "weight")]
    h = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w2, b2)), 2).flatten(1)
    for weight, bias in linear[:-1]:
        h = F.relu(F.linear(h, weight, bias))
    torch.testing.assert_close(net(x), F.linear(h, *linear[-1]))


def test_resnet_groups_stem_and_pickling():
    net = ResNet18GN(groups=4)
    assert {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)} == {4}
    assert net.net.maxpool(net.net.conv1(torch.zeros(1, 3, 32, 32))).shape[-2:] == (32, 32)
    copy = pickle.loads(pickle.dumps(net))
    assert torch.equal(copy.net.fc.weight, net.net.fc.weight)
    with pytest.raises(UserError, match="groups = 3 does not divide 64 channels; use 1, 2, 4"):
        ResNet18GN(groups=3)
