from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fl_lightning import FedAvg, nets
from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import FlatNet, FlatSpec
from fl_lightning.core.losses import PixelCrossEntropy
from fl_lightning.flatness import hessian
from fl_lightning.nets import (
    FLSAMCNN,
    BiSeNetV2,
    DigitsCNN,
    DigitsMLP,
    FashionCNN,
    FastText,
    FullyConnected,
    HsuCNN,
    MobileNetV2GN,
    PreActResNet18GN,
    ResNet8GN,
    ResNet18GN,
    ResNet18NoNorm,
    TextTransformer,
    ViTCIFAR,
)

COUNTS = [  # of the specification, but for the nets marked
    (DigitsMLP, (1, 8, 8), 10, 4_810),
    (DigitsCNN, (1, 8, 8), 10, 1_898),
    (FashionCNN, (1, 28, 28), 10, 16 * 26 + 32 * (16 * 25 + 1) + 10 * 513),  # ours
    (FullyConnected, (1, 28, 28), 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    (lambda: FullyConnected(12, (), 3), (12,), 3, 12 * 3 + 3),
    (HsuCNN, (3, 32, 32), 10, 797_962),
    (lambda: HsuCNN(100), (3, 32, 32), 100, 815_332),
    (lambda: HsuCNN(10, in_channels=1), (1, 32, 32), 10, 794_762),
    (FLSAMCNN, (3, 32, 32), 10, 2_156_490),
    (ResNet18GN, (3, 32, 32), 10, 11_173_962),
    (lambda: ResNet18GN(stem="imagenet"), (3, 32, 32), 10, 11_181_642),
    (lambda: ResNet18GN(100, stem="imagenet"), (3, 32, 32), 100, 11_227_812),
    # the CIFAR stem's, less 4,800 scales and shifts, more classes
    (ResNet18NoNorm, (3, 32, 32), 100, 11_173_962 - 2 * 4_800 + 90 * 513),
    # as many norms of the same widths as the other order has
    (PreActResNet18GN, (3, 24, 24), 100, 11_227_812),
    (ResNet8GN, (3, 32, 32), 100, 1_258_404),
    (ViTCIFAR, (3, 32, 32), 10, 1_825_162),
    (MobileNetV2GN, (3, 64, 64), 2028, 4_821_740),  # torchvision's with BatchNorm
]


@pytest.mark.parametrize(("make", "shape", "classes", "weights"), COUNTS)
def test_shapes_and_weight_counts(
    make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, weights: int
) -> None:
    with torch.device("meta"):
        net = make()
        assert sum(p.numel() for p in net.parameters()) == weights
        assert net(torch.zeros(2, *shape)).shape == (2, classes)
        assert not list(net.buffers())  # no batch statistics


def test_fasttext_is_a_linear_function_of_mean_embeddings() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in FastText().parameters()) == 3_157_508
    net = FastText(vocabulary=11, dim=5)
    x = torch.tensor([[3, 7, 0, 0], [0, 0, 0, 0]])
    mean = (net.embedding.weight[3] + net.embedding.weight[7]) / 4  # the padding counts
    torch.testing.assert_close(net(x)[0], net.fc.weight @ (net.hidden.weight @ mean + net.hidden.bias) + net.fc.bias)
    torch.testing.assert_close(net(x)[1], net.fc(net.hidden.bias))


def test_vit_against_torch_attention() -> None:
    """One block is computed by nn.MultiheadAttention; queries make up for its other scale."""
    torch.manual_seed(0)
    net, heads, dim = ViTCIFAR(num_classes=3, dim=8, blocks=1, heads=2).double(), 2, 8
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    block = net.blocks[0]
    attention = nn.MultiheadAttention(dim, heads, batch_first=True).double()
    scale = (dim / heads) ** 0.5 / dim**0.5
    with torch.no_grad():
        for name in ("weight", "bias"):
            parts = [getattr(block.q, name) * scale, getattr(block.k, name), getattr(block.v, name)]
            getattr(attention, f"in_proj_{name}").copy_(torch.cat(parts))
            getattr(attention.out_proj, name).copy_(getattr(block.out, name))
    patches = F.unfold(x, 4, stride=4).view(2, 3, 16, 64).permute(0, 3, 2, 1).reshape(2, 64, 48)  # colours vary fastest
    h = net.embedding(patches) + net.position
    n = block.norm1(h)
    h = h + attention(n, n, n, need_weights=False)[0]
    first, _, second, _ = block.mlp
    h = h + F.gelu(second(F.gelu(first(block.norm2(h)))))
    torch.testing.assert_close(net(x), net.head(h.mean(1)))


def test_preactivation_resnet_keeps_its_size_between_stages() -> None:
    net = PreActResNet18GN(num_classes=3)
    x = torch.randn(1, 3, 24, 24)
    assert net.stem(x).shape == (1, 64, 6, 6)
    assert net.blocks(net.stem(x)).shape == (1, 512, 6, 6)
    # pre-activation: what a block adds to does not pass a ReLU
    block, h = net.blocks[1], torch.randn(1, 64, 6, 6)
    with torch.no_grad():
        block.residual[-1].weight.zero_()
    assert torch.equal(block(h), h)


def test_hsu_cnn_is_the_published_network() -> None:
    """The function is the same with ReLU before pooling, as the papers draw it."""
    net = HsuCNN().double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (w1, b1), (w2, b2), *linear = [(m.weight, m.bias) for m in net if hasattr(m, "weight")]
    h = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w2, b2)), 2).flatten(1)
    for weight, bias in linear[:-1]:
        h = F.relu(F.linear(h, weight, bias))
    torch.testing.assert_close(net(x), F.linear(h, *linear[-1]))


def test_resnet_groups_stem_and_pickling() -> None:
    net = ResNet18GN(groups=4)
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {4}
    assert net.net.maxpool(net.net.conv1(torch.zeros(1, 3, 32, 32))).shape[-2:] == (32, 32)
    copy = pickle.loads(pickle.dumps(net))
    assert torch.equal(copy.net.fc.weight, net.net.fc.weight)
    with pytest.raises(UserError, match="groups = 3: must divide 64 channels; use 1, 2, 4"):
        ResNet18GN(groups=3)
    with pytest.raises(UserError, match="groups = 16: must divide 8 channels; use 1, 2, 4, 8"):
        MobileNetV2GN(groups=16)


def test_bare_names_are_not_ambiguous() -> None:
    """On the command line a bare name is looked up among all modules that are loaded."""
    import torchvision  # noqa: F401

    def below(cls: type) -> set[type]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    names = [cls.__name__ for cls in below(nn.Module)]
    assert [name for name in nets.__all__ if names.count(name) != 1] == []


# What the engines and the measures of flatness need of every net


class Small(NamedTuple):
    make: Callable[[], nn.Module]
    draw: Callable[..., Tensor]  # (clients, samples)
    classes: int
    channels: bool = True


def images(*shape: int) -> Callable[..., Tensor]:
    return lambda *lead: torch.randn(*lead, *shape, dtype=torch.float64)


SMALL = {
    "FullyConnected": Small(lambda: FullyConnected(12, (7, 5), 3), images(12), 3, channels=False),
    "HsuCNN": Small(lambda: HsuCNN(3), images(3, 32, 32), 3),
    "FLSAMCNN": Small(lambda: FLSAMCNN(3), images(3, 32, 32), 3),
    "ResNet18GN": Small(lambda: ResNet18GN(3), images(3, 8, 8), 3),
    "ResNet18NoNorm": Small(lambda: ResNet18NoNorm(3), images(3, 8, 8), 3),
    "ResNet8GN": Small(lambda: ResNet8GN(3), images(3, 16, 16), 3),
    "PreActResNet18GN": Small(lambda: PreActResNet18GN(3), images(3, 8, 8), 3),
    "ViTCIFAR": Small(lambda: ViTCIFAR(3, dim=8, blocks=1, heads=2), images(3, 32, 32), 3),
    "FastText": Small(lambda: FastText(13, 6, 3), lambda *lead: torch.randint(0, 13, (*lead, 9)), 3, channels=False),
    "MobileNetV2GN": Small(lambda: MobileNetV2GN(3), images(3, 32, 32), 3),
}


SLOW = {"ResNet18GN"}  # ResNet8GN is of the same blocks


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SMALL])
def small(request: Any) -> tuple[Small, nn.Module, Tensor, Tensor]:
    """Returns a net in float64, two clients' minibatches of two samples."""
    torch.manual_seed(0)
    case = SMALL[request.param]
    return case, case.make().double(), case.draw(2, 2), torch.randint(0, case.classes, (2, 2))


@pytest.mark.sampled(quick=11, slow=5)
def test_gradients_flat_batched_and_channels_last(small: Any) -> None:
    """FlatNet, vmap over clients at different weights, and images in channels_last all give the same."""
    case, net, x, y = small
    spec = FlatSpec(net)
    w0 = spec.vector(net)
    w = torch.stack([w0, w0 * 1.01])

    def loss(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, spec.split(v), (x,)), y)

    batched = vmap(grad(loss))(w, x, y)
    flat = FlatNet(net)
    for k in range(2):
        flat.move_to(w[k])
        plain = torch.autograd.grad(F.cross_entropy(net(x[k]), y[k]), list(net.parameters()))
        expected = torch.cat([g.reshape(-1) for g in plain])
        assert expected.norm() > 1e-6
        seen = x[k].contiguous(memory_format=torch.channels_last) if case.channels else x[k]
        gradient = flat.gradient(F.cross_entropy(net(seen), y[k]))
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(batched[k], expected, rtol=1e-9, atol=1e-11)


def test_a_parameter_without_axes() -> None:
    net = nn.Linear(2, 1)
    net.gate = nn.Parameter(torch.tensor(3.0))
    parts = FlatSpec(net).split(torch.arange(4.0))
    assert {name: v.tolist() for name, v in parts.items()} == {"weight": [[0, 1]], "bias": [2], "gate": 3}


@pytest.mark.sampled(quick=11)
def test_hessian_vector_product_is_the_slope_of_the_gradient(small: Any) -> None:
    """Double backward agrees with a central difference."""
    _, net, x, y = small
    spec, x, y = FlatSpec(net), x[0], y[0]
    w = spec.vector(net)
    loss = nn.CrossEntropyLoss(reduction="none")
    v = torch.autograd.grad(loss(net(x), y).mean(), list(net.parameters()))
    v = torch.cat([g.reshape(-1) for g in v])
    v /= v.norm()
    product = hessian(net, loss, [(x, y)], w) @ v

    def gradient(at: Tensor) -> Tensor:
        spec.load(net, at)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(net(x), y).mean(), list(net.parameters()))])

    slope = (gradient(w + 1e-6 * v) - gradient(w - 1e-6 * v)) / 2e-6
    assert slope.norm() > 1e-6
    assert (product - slope).norm() < 1e-4 * slope.norm()


@pytest.mark.sampled(quick=3)
def test_bfloat16_autocast(small: Any) -> None:
    """Logits are near those of float32, gradients finite and in float32."""
    _, net, x, y = small
    net, x, y = net.float(), x[0].float() if x.is_floating_point() else x[0], y[0]
    flat = FlatNet(net)
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(x)
        loss = F.cross_entropy(logits, y)
    full = net(x)
    assert (logits.float() - full).norm() < 0.1 * full.norm()
    g = flat.gradient(loss)
    assert g.dtype == torch.float32 and bool(torch.isfinite(g).all())


@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm(3), lambda: nn.Embedding(5, 4, 0)])
def test_hessian_vector_products_under_vmap(make: Callable[[], nn.Module]) -> None:
    """For layers that normalise and embed, a product for each of two clients is that of each alone."""
    torch.manual_seed(0)
    layer = make().double()
    spec = FlatSpec(layer)
    w, v = torch.randn(2, 2, spec.d, dtype=torch.float64)
    x: Tensor = torch.randint(0, 5, (2, 3)) if isinstance(layer, nn.Embedding) else torch.randn(2, 2, 4, 3).double()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, spec.split(w), (x,))
        return (out**3).sum() + out[0].exp().sum()

    def product(w: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return torch.func.grad(lambda w: grad(loss)(w, x) @ v)(w)

    both = vmap(product)(w, x, v)
    for k in range(2):
        a = w[k].clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(a, x[k]), a, create_graph=True)
        (alone,) = torch.autograd.grad(g @ v[k], a)
        torch.testing.assert_close(both[k], alone)
        assert alone.norm() > 0.1


# BiSeNetV2, the one net with running statistics


@pytest.mark.slow
def test_bisenet() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        full, plain = BiSeNetV2(), BiSeNetV2(auxiliary=False)
        heads = [
            9 * channels * 128 + 2 * 128 + (128 + 1) * 19 * up**2
            for channels, up in ((16, 4), (32, 8), (64, 16), (128, 32))
        ]
        total, without = (sum(p.numel() for p in net.parameters()) for net in (full, plain))
        assert total == without + sum(heads)
        assert {tuple(y.shape) for y in full(torch.zeros(2, 3, 64, 96))} == {(2, 19, 64, 96)}
        assert len(full(torch.zeros(2, 3, 32, 32))) == 5
        assert full.eval()(torch.zeros(2, 3, 64, 32)).shape == (2, 19, 64, 32)
    net = BiSeNetV2(num_classes=2)
    branches = net.segment[1][0], net.segment[1][1]
    x = torch.randn(2, 16, 8, 8)
    y = branches[0](x)  # at first the layers are their shortcuts
    torch.testing.assert_close(y, branches[0].shortcut(x).relu())
    torch.testing.assert_close(branches[1](y), y)
    objective = FedAvg(net=net.double(), loss=PixelCrossEntropy(hardest=0.25), buffers="local")
    flat, x, target = FlatNet(net), torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.randint(0, 2, (2, 32, 32))
    g = flat.gradient(objective.training_step((x, target), 0))
    parts = flat.spec.split(g)
    assert all(parts[f"{name}.conv_out.0.weight"].norm() > 0 for name in ("head", "aux2", "aux3", "aux4", "aux5_4"))


# Weights from elsewhere


def test_bisenet_takes_a_backbone_by_part(tmp_path: Any) -> None:
    source = BiSeNetV2(num_classes=2)
    parts = {name: getattr(source, name).state_dict() for name in ("detail", "segment", "bga")}
    torch.save(parts, tmp_path / "backbone.pth")
    net = BiSeNetV2(num_classes=3, pretrained=str(tmp_path / "backbone.pth"))
    for name, state in parts.items():
        assert all(torch.equal(value, state[key]) for key, value in getattr(net, name).state_dict().items())
    torch.save(source.state_dict(), tmp_path / "flat.pth")
    with pytest.raises(UserError, match=r"pretrained = .*by part; the parts are detail, segment"):
        BiSeNetV2(pretrained=str(tmp_path / "flat.pth"))
    parts["bga"].popitem()
    torch.save(parts, tmp_path / "short.pth")
    with pytest.raises(UserError, match=r"does not fit Aggregation: 'conv.1.num_batches_tracked' is missing"):
        BiSeNetV2(pretrained=str(tmp_path / "short.pth"))


@pytest.mark.slow
def test_mobilenet_takes_weights_of_batchnorm(tmp_path: Any) -> None:
    from torchvision.models import mobilenet_v2

    source = mobilenet_v2(num_classes=5)
    torch.save(source.state_dict(), path := tmp_path / "mobilenet.pth")
    new_head, same_head = (MobileNetV2GN(classes, pretrained=str(path)) for classes in (4, 5))
    weights = source.state_dict()
    for name, value in new_head.net.state_dict().items():
        assert torch.equal(value, weights[name]) == (not name.startswith("classifier.")), name
    assert torch.equal(same_head.net.classifier[1].weight, source.classifier[1].weight)
    for name, change in (
        ("features.0.0.weight", lambda state, name: state.pop(name)),
        ("features.3.new", lambda state, name: state.update({name: torch.zeros(1)})),
        ("features.0.1.bias", lambda state, name: state.update({name: torch.zeros(3)})),
    ):
        state = dict(weights)
        change(state, name)
        torch.save(state, path)
        with pytest.raises(UserError, match=f"pretrained does not fit MobileNetV2: '{name}' is missing, unknown"):
            MobileNetV2GN(5, pretrained=str(path))
    with pytest.raises(UserError, match=r"pretrained = nowhere.pth: no such file"):
        MobileNetV2GN(pretrained="nowhere.pth")
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"mobilenet.pth: not readable"):
        MobileNetV2GN(pretrained=str(path))


def test_weights_that_cannot_be_downloaded_are_one_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    message = (
        r"pretrained = torchvision: https://.*mobilenet_v2.*\.pth cannot be downloaded \(.*no network.*\); put the file"
    )
    with pytest.raises(UserError, match=rf"{message} into {tmp_path}/hub/checkpoints, or give its path$"):
        MobileNetV2GN(pretrained="torchvision")


def test_initial_weights_of_a_net_with_a_part_called_net() -> None:
    """The prefix of a checkpoint is distinguished from the net's own names."""
    source = ResNet8GN(2)
    for prefix in ("", "net."):
        state = {prefix + name: value for name, value in source.state_dict().items()}
        objective = FedAvg(net=ResNet8GN(2), init_weights=state)
        assert torch.equal(objective.net.net.conv1.weight, source.net.conv1.weight)


@pytest.mark.parametrize("net", [lambda: ViTCIFAR(heads=7), lambda: TextTransformer(heads=7)])
def test_heads_must_divide_the_width(net: Callable[[], nn.Module]) -> None:
    message = r"^model.net.heads = 7: does not divide the width, dim = (384|128); use a divisor$"
    with pytest.raises(UserError, match=message):
        net()


def test_group_norm_behind_frozen_layers_gets_contiguous_inputs_where_torch_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does before torch 2.15, on the CPU; an input that needs a gradient stays channels_last."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    net, seen = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), list[Tensor]()
    FedAvg(net), FedAvg(net)
    assert len(net[1]._forward_pre_hooks) == 1
    net[1].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    for frozen in (True, False):
        net[0].requires_grad_(not frozen)
        net(x).sum().backward()
        assert seen[-1].is_contiguous() == frozen
    assert net[1](input=net[0](x)).shape == (2, 4, 4, 4)
    monkeypatch.undo()
    FedAvg(same := nn.GroupNorm(2, 4))
    assert bool(same._forward_pre_hooks) == (torch.__version__ < "2.15")
