"""Nets of which only a part is trained, on every engine: the rest never changes, and is neither sent nor kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import (
    EMA,
    SAM,
    SWA,
    Arrays,
    FedAvg,
    FlatnessMonitor,
    FlexLoRA,
    Frozen,
    LambdaMax,
    LocalObjective,
    LoRA,
    Sharpness,
    TextTransformer,
    Trajectory,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.module import with_features
from fl_lightning.core.forward import batch_statistics, eval_mode
from fl_lightning.core.weights import constants, digest, moving_buffers
from fl_lightning.trainer.run import Run
from tests.engine.test_engines import Net, assert_close, train
from tests.problem import optimizer_for
from tests.trainer.test_trainer import numbers

ENGINES = ("sequential", "batched", "graphed")


class Small(nn.Sequential):
    """A frozen layer of 292 weights and a trained one of 15."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Flatten(), nn.Linear(72, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.sampled(quick=48, slow=9, start=8)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_trains_what_is_not_frozen(name: str, tmp_path: Path) -> None:
    """Every engine gives the same; no frozen bit changes; what goes over the wire are the trained weights."""

    def objective() -> LocalObjective:
        optimizer = optimizer_for(name, 0.05, momentum=0.9, weight_decay=1e-3, clip=1.0)
        return getattr(algorithms, name)(net=Frozen(Small(), ["3"]), optimizer=optimizer)  # type: ignore[no-any-return]

    before = digest(constants(objective().net))
    runs = [train(tmp_path, objective(), engine, max_rounds=2) for engine in ENGINES]
    for run in runs:
        assert run.objective.flat.d == 15 and not torch.equal(run.server.w, run.clients.w0)
        assert digest(constants(run.objective.net)) == run.frozen == before
        assert_close(run, runs[0])
    assert runs[0].metrics["comm/total_bits"] == numbers(name, runs[0].objective.flat) * 64 * 2 * 4


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedSMOO"])
def test_a_frozen_layer_is_data(name: str, tmp_path: Path) -> None:
    """Training a head on a frozen layer equals training it on that layer's outputs."""
    net = Small().double()
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 2, 6, 6)) for n in (11, 6, 8)]
    y = [rng.integers(0, 3, len(samples)) for samples in x]
    y[0][:3] = 0, 1, 2
    z = [nn.Sequential(*list(net)[:3])(torch.from_numpy(samples)).detach().numpy() for samples in x]

    def trained(inputs: list[Any], model: nn.Module) -> Run:
        data = Arrays(client_arrays=list(zip(inputs, y, strict=True))[:2], test=(inputs[2], y[2]), batch_size=4)
        algorithm = getattr(algorithms, name)(net=model, averaging=EMA(0.5))
        monitor = FlatnessMonitor(1, [LambdaMax(), Sharpness(rho=0.1)])
        options = {"clients_per_round": 2, "local_steps": 3, "callbacks": [monitor]}
        return train(tmp_path, algorithm, "sequential", arrays=data, **options)

    full = trained(x, Frozen(net, ["3"]))
    head = nn.Sequential(nn.Linear(4, 3))
    head[0].load_state_dict(Small()[3].state_dict())
    alone = trained(z, head)
    assert_close(full, alone)
    keys = {name for name in alone.metrics if name.startswith(("server/", "flatness/"))}
    assert len(keys) >= 4
    for key in keys:
        assert full.metrics[key] == pytest.approx(alone.metrics[key], rel=1e-9), key


def tokens() -> Arrays:
    """Texts of 6 tokens out of 20; the class is that of the most frequent quarter of the vocabulary."""
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 20, (n, 6)) for n in (9, 5, 8, 40)]
    y = [np.array([np.bincount(row // 5, minlength=4).argmax() for row in texts]) for texts in x]
    y[0][:4] = 0, 1, 2, 3
    return Arrays(client_arrays=list(zip(x, y, strict=True))[:3], test=(x[3], y[3]), batch_size=4)


def transformer() -> TextTransformer:
    torch.manual_seed(2)
    return TextTransformer(vocabulary=20, length=6, dim=8, blocks=1, heads=2)


def lora(**options: Any) -> LoRA:
    pytest.importorskip("peft")
    return LoRA(transformer(), rank=2, **{"targets": ["q", "v"], "trained": ["head"], **options})


@pytest.mark.long
def test_lora_on_every_engine(tmp_path: Path) -> None:
    """Adapters and head are trained; A B starts at zero, so the first model is that without adapters."""
    x = torch.arange(12).view(2, 6)
    assert torch.equal(lora()(x), transformer()(x))
    d = 2 * 2 * (2 * 8) + (8 + 8 + 8 * 4 + 4)
    runs = []
    for engine in ENGINES:
        objective = algorithms.FedDyn(net=lora(), ascent=SAM(0.05), averaging=SWA(start=1, cycle=1))
        before = digest(constants(objective.net))
        runs.append(train(tmp_path, objective, engine, arrays=tokens(), clients_per_round=3, local_steps=3))
        assert objective.flat.d == d and digest(constants(objective.net)) == before
        assert_close(runs[-1], runs[0])
    assert runs[0].metrics["comm/total_bits"] == 2 * d * 64 * 3 * 3
    assert float(objective.flat.split(runs[0].server.w)["net.blocks.0.q.lora_B.default.weight"].abs().max()) > 0


@pytest.mark.parametrize("target", ["1", "3"])
def test_merged_weights_of_a_layer_that_another_one_shares(target: str) -> None:
    """The adapter belongs to one of them."""
    pytest.importorskip("peft")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    plain[3].weight = plain[1].weight
    net, x = LoRA(plain, [target]), torch.randn(5, 6)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        torch.testing.assert_close(net.merged()(x), net(x))


@pytest.mark.slow
def test_curvature_by_layer_and_in_the_merged_space(tmp_path: Path) -> None:
    """Dense Hessians have the same blocks: of the factors, and of a net without adapters with weights W + 8 B A."""
    options: dict[str, Any] = {"samples": None, "tol": 1e-7, "iterations": 300}
    measures = [LambdaMax(by_layer=True, **options), LambdaMax(merged=True, **options)]
    measures.append(LambdaMax(by_layer=True, merged=True, parameters=["blocks.*"], **options))
    monitor = FlatnessMonitor(1, measures)
    run = train(
        tmp_path,
        FedAvg(net=lora()),
        "sequential",
        arrays=tokens(),
        max_rounds=2,
        clients_per_round=3,
        callbacks=[monitor],
    )
    net, flat, start = transformer().double(), run.objective.flat, dict(transformer().double().named_parameters())
    x, y = torch.cat(list(run.data.x_train)).view(-1, 6), run.data.y_train

    def loss(*values: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))
        return nn.functional.cross_entropy(output, y)

    def plain(*values: torch.Tensor) -> list[torch.Tensor]:
        by = dict(zip(flat.names, values, strict=True))
        merged = [start[n] + 8 * by[f"net.{n[:-7]}.lora_B.default.weight"] @ by[f"net.{n[:-7]}.lora_A.default.weight"]
                 for n in names[:2]]  # fmt: skip
        return [*merged, *(by[f"net.{n}"] for n in names[2:])]

    def dense(f: Any, values: Any, block: slice) -> float:
        rows = torch.autograd.functional.hessian(f, tuple(values))
        matrix = [[b.reshape(values[i].numel(), -1) for b in row[block]] for i, row in enumerate(rows)][block]
        return float(torch.linalg.eigvalsh(torch.cat([torch.cat(row, 1) for row in matrix])).max())

    names = ["blocks.0.q.weight", "blocks.0.v.weight", *(n for n in start if n.startswith("head"))]
    factors = list(flat.split(run.server.w).values())
    with torch.no_grad():
        weights = plain(*factors)
    expected = {
        "net_blocks_0_q": dense(lambda *v: loss(*plain(*v)), factors, slice(0, 2)),
        "net_head_1": dense(lambda *v: loss(*plain(*v)), factors, slice(6, 8)),
        "merged": dense(loss, weights, slice(None)),
        "merged_blocks_0_v": dense(loss, weights, slice(1, 2)),
    }
    for name, value in expected.items():
        assert run.metrics[f"flatness/{name}_lambda_max"] == pytest.approx(value, rel=1e-6), name
    assert sum(name.endswith("lambda_max") for name in run.metrics) == 4 + 1 + 2


def test_factors_of_which_only_b_is_trained(tmp_path: Path) -> None:
    """A keeps its bits; the mean of the clients' products is the product of the means."""
    objective = FedAvg(net=lora(factors="B", trained=[]))
    run = train(
        tmp_path,
        objective,
        "sequential",
        arrays=tokens(),
        max_rounds=2,
        clients_per_round=2,
        callbacks=[record := Trajectory()],
    )
    assert objective.flat.d == 2 * 2 * 8 and run.metrics["comm/total_bits"] == 2 * 2 * 2 * objective.flat.d * 64
    A = objective.net.get_parameter("net.blocks.0.q.lora_A.default.weight")
    assert torch.equal(A, lora().double().get_parameter("net.blocks.0.q.lora_A.default.weight"))
    product = record.server[-1].w[:16].view(8, 2) @ A
    products = [(int(run.data.client_sizes[k]), end.w[:16].view(8, 2) @ A) for k, end in record.local[-1].items()]
    mean = sum(n * matrix for n, matrix in products) / sum(n for n, _ in products)
    torch.testing.assert_close(product, mean, rtol=1e-12, atol=1e-15)


@pytest.mark.long
def test_mean_of_products(tmp_path: Path) -> None:
    """The server's product is the best approximation of the mean product, on every engine; bits are of factors."""
    weights, layers = [], ("net.blocks.0.q", "net.blocks.0.v")
    for engine in ENGINES:
        objective = FedAvg(net=lora(), ascent=SAM(0.05), parts=[FlexLoRA()])
        options = {"arrays": tokens(), "clients_per_round": 3, "callbacks": [record := Trajectory()]}
        run = train(tmp_path, objective, engine, **options)
        flat, sizes = objective.flat, run.data.client_sizes
        assert run.metrics["comm/total_bits"] == 3 * 3 * 2 * flat.d * 64
        for t, results in enumerate(record.local):
            after = flat.split(record.server[t + 1].w)
            n = sum(int(sizes[k]) for k in results)
            for layer in layers:
                a, b = (f"{layer}.lora_{x}.default.weight" for x in "AB")
                ends = [(int(sizes[k]) / n, flat.split(result.w)) for k, result in results.items()]
                u, s, v = np.linalg.svd(sum(share * (end[b] @ end[a]).numpy() for share, end in ends))
                best = u[:, :2] * s[:2] @ v[:2]
                np.testing.assert_allclose((after[b] @ after[a]).numpy(), best, rtol=0, atol=1e-12)
                assert s[2] > 1e-8  # the mean has a larger rank
            head = sum(share * end["net.head.1.weight"] for share, end in ends)
            torch.testing.assert_close(after["net.head.1.weight"], head, rtol=0, atol=1e-12)
        weights.append(record.server[-1].w)
    for w in weights[1:]:
        torch.testing.assert_close(w, weights[0], rtol=0, atol=1e-10)


def test_flexlora_with_relaxed_init_is_refused() -> None:
    """Its products are those of the clients' models, the other weights are not."""
    pytest.importorskip("peft")
    net = LoRA(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), ["1"])
    with pytest.raises(UserError, match=r"FlexLoRA: the server averages models, and nothing else; .*relaxed_init"):
        FedAvg(net=net, parts=[FlexLoRA()], relaxed_init=0.1)


def test_a_rank_above_the_shorter_side(tmp_path: Path) -> None:
    """The mean of products is exact; what the factors have beyond that side is 0."""
    pytest.importorskip("peft")
    net = LoRA(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), ["1"], rank=5)
    objective, record = FedAvg(net=net, parts=[FlexLoRA()]), Trajectory()
    run = train(tmp_path, objective, "sequential", max_rounds=1, callbacks=[record])
    ends = [(run.data.client_sizes[k], objective.flat.split(end.w).values()) for k, end in record.local[0].items()]
    mean = sum(n * B @ A for n, (A, B) in ends) / sum(n for n, _ in ends)
    A, B = objective.flat.split(run.server.w).values()
    torch.testing.assert_close(B @ A, mean, rtol=0, atol=1e-14)
    assert A.shape == (5, 72) and not A[3:].any() and not B[:, 3:].any() and mean.norm() > 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(net=Frozen(Small(), ["3"]), parts=[FlexLoRA()]), "needs a LoRA net that trains A and B"),
        (lambda: FedAvg(net=lora(factors="B"), parts=[FlexLoRA()]), "needs a LoRA net that trains A and B"),
        (lambda: algorithms.FedDyn(net=lora(), parts=[FlexLoRA()]), "take FedAvg or FedSAM"),
        (lambda: algorithms.FedAvgM(net=lora(), parts=[FlexLoRA()]), "take FedAvg or FedSAM"),
    ],
)
def test_products_of_what_cannot_have_them(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^model.parts: FlexLoRA.*{message}"):
        make()


def fused(target: str) -> LoRA:
    pytest.importorskip("peft")
    return LoRA(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4)), [target])


def test_an_adapter_is_no_classifier() -> None:
    """Features are the same with an adapter of the last layer."""
    x = torch.arange(12).view(2, 6)
    features = []
    for net in (transformer(), lora(targets=["head.1"], trained=[])):
        with with_features(net):
            features.append(net(x)[1])
    assert features[0].shape == (2, 8) and torch.equal(*features)


@pytest.mark.long
def test_lora_compiled(tmp_path: Path) -> None:
    options = {"arrays": tokens(), "clients_per_round": 2, "local_steps": 1}
    runs = [
        train(tmp_path, FedAvg(net=lora()), engine, compile=compiled, **options)
        for engine, compiled in (("sequential", False), ("graphed", True))
    ]
    assert_close(*runs)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)), nn.Flatten(), nn.Linear(64, 3)
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_module_is_in_eval_mode(engine: str, tmp_path: Path) -> None:
    """BatchNorm keeps its statistics and needs no policy, Dropout drops nothing, so that every engine runs them."""
    net = Frozen(Normed(), ["2"])
    before = {name: value.clone() for name, value in net.state_dict().items() if not name.startswith("net.2")}
    run = train(tmp_path, FedAvg(net=net), engine, max_rounds=2)
    assert net.training and not net.net[0].training and net.net[2].training
    for name, value in before.items():
        assert torch.equal(net.state_dict()[name].to(value.dtype), value), name
    assert run.objective.net_buffers is None
    assert_close(run, train(tmp_path, FedAvg(net=Frozen(Normed(), ["2"])), "sequential", max_rounds=2))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_statistics_of_trained_modules_follow_the_policy(policy: Any, tmp_path: Path) -> None:
    """A frozen BatchNorm next to a trained one: only the trained one's statistics move, also where torch estimates."""

    def objective() -> LocalObjective:
        torch.manual_seed(1)
        parts = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3)
        with torch.no_grad():
            parts[0][1].running_mean += 1
        return algorithms.FedGMT(net=Frozen(nn.Sequential(*parts), ["2", "3"]), buffers=policy)

    run = train(tmp_path, objective(), "sequential", batch=None, local_steps=2)
    buffers, net = run.objective.net_buffers, run.objective.net
    assert buffers is not None and buffers.first.shape == (128,)
    assert torch.equal(net.net[0][1].running_mean, torch.ones(4, dtype=torch.float64))
    assert int(net.net[0][1].num_batches_tracked) == 0
    with pytest.raises(UserError, match=r"buffer 'net\.2\.running_mean'"):
        FedAvg(net=Frozen(nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.BatchNorm1d(4)), ["2"]))


def test_a_frozen_norm_computes_what_it_did() -> None:
    """It does also where evaluation takes the statistics of each batch."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    net, x = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(64, 3)), torch.randn(9, 2, 6, 6) * 3 + 1
    net(x)
    expected = net.eval()(x)
    frozen = Frozen(net, ["3"])
    assert torch.equal(frozen.eval()(x), expected)
    with eval_mode(frozen), batch_statistics(frozen):
        assert torch.equal(frozen(x), expected)


@pytest.mark.parametrize(("trained", "moves"), [(["3"], False), (["1", "3"], True), (["0.1", "3"], True)])
def test_a_norm_without_weights_is_frozen_with_what_comes_before(trained: list[str], moves: bool) -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU()), nn.BatchNorm2d(4, affine=False))
    net.extend([nn.Flatten(), nn.Linear(64, 3)])
    frozen = Frozen(net, trained)
    frozen.train()(torch.randn(9, 2, 6, 6) + 1)
    assert bool(net[1].running_mean.any()) is moves
    assert moving_buffers(frozen) == [f"net.1.{name}" for name, _ in net[1].named_buffers()] * moves


def test_a_net_frozen_by_hand(tmp_path: Path) -> None:
    """Without a wrapper a frozen BatchNorm needs a policy as long as it is in train mode."""
    net = Net()
    net[0].requires_grad_(False)
    run = train(tmp_path, FedAvg(net=net), "batched")
    assert run.objective.flat.d == sum(p.numel() for p in net.parameters() if p.requires_grad)
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 3))
    norm[1].requires_grad_(False)
    with pytest.raises(UserError, match=r"buffer '1\.running_mean'"):
        FedAvg(net=norm)
    norm[1].eval()
    assert FedAvg(net=norm).net_buffers is None
    norm.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        FedAvg(net=norm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Frozen(Small(), ["4"]), r"model\.net\.trained = 4: no parameters of that name in Small; it has 1, 3"),
        (lambda: Frozen(Small(), []), r"model\.net\.trained = \[\]: give"),
        (lambda: Frozen(Small(), ["3"], weights="no.pt"), r"model\.net\.weights = no\.pt: no such file"),
        (lambda: lora(trained=["haed"]), r"model\.net\.trained = haed: no parameters"),
        (lambda: lora(targets=["q", "w"]), r"model\.net\.targets = w: no layer of that name in TextTransformer"),
        (lambda: fused("linear1"), r"model\.net\.targets = linear1: TransformerEncoderLayer does not call its layers"),
        (lambda: fused("self_attn"), r"model\.net\.targets = self_attn: MultiheadAttention does not call its layers"),
        (lambda: fused("out_proj"), r"model\.net\.targets = out_proj: MultiheadAttention does not call its layers"),
        (lambda: lora(targets=["norm1"]), r"model\.net\.targets = \['norm1'\]: Target module LayerNorm"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_pretrained_weights(tmp_path: Path) -> None:
    """The body is that of a file; a trained head that is not there, or of another shape, keeps its initial weights."""
    body, path = Small(), str(tmp_path / "body.pt")
    with torch.no_grad():
        body[1].weight += 1
    wider = nn.Sequential(*list(body)[:3], nn.Linear(4, 7))
    files = nn.Sequential(*list(body)[:3]).state_dict(), wider.state_dict()
    for saved in (*files, {f"net.{name}": value for name, value in wider.state_dict().items()}):
        torch.save(saved, path)
        net = Frozen(Small(), ["3"], weights=path)
        assert torch.equal(net.net[1].weight, body[1].weight) and torch.equal(net.net[3].weight, Small()[3].weight)
    torch.save(body.state_dict(), path)
    with torch.no_grad():
        body[3].weight += 1
    torch.save(body.state_dict(), path)
    assert torch.equal(Frozen(Small(), ["3"], weights=path).net[3].weight, body[3].weight)
    torch.save(nn.Sequential(*list(body)[1:]).state_dict(), path)
    with pytest.raises(UserError, match=r"model\.net\.weights does not fit Small"):
        Frozen(Small(), ["3"], weights=path)
