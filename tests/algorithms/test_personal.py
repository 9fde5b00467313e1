"""Parameters that stay with each client: identities with the algorithms themselves, what travels, what is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    SAM,
    SGD,
    BernoulliSampler,
    Callback,
    ClientEvaluation,
    ClientLambdaMax,
    CoordinateMedian,
    Corrupt,
    Digits,
    DigitsMLP,
    Ditto,
    Faults,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    GaussianPrivacy,
    HessianTrace,
    LambdaMax,
    LocalObjective,
    Muon,
    NaiveFedGloSS,
    NormClipping,
    Personal,
    ReplaySampler,
    Spectrum,
    TorchOptimizer,
    UniformSampler,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import State, generator
from fl_lightning.engine import Job, LocalResult
from fl_lightning.flower.server import check
from fl_lightning.trainer.evaluation import Evaluator
from fl_lightning.trainer.measurements import curvature
from fl_lightning.trainer.run import Run
from tests.problem import Golden
from tests.runs import cli, last, metrics, run

D, OWN = 1220, 4 * 16 + 4
"""Weights of the net, and of its head, fc2, which lies at the end."""
HEAD = ["fc2.*"]
ENGINES = ["sequential", "batched", pytest.param("graphed", marks=pytest.mark.slow)]
PRESETS = Path(__file__).parents[2] / "configs/presets/personal"
AVERAGES_MOMENTS = {"FedMuon", "FedAdamW"}


def made(golden: Golden, algorithm: Any = FedAvg, part: Part | None = None, **options: Any) -> LocalObjective:
    options = {"optimizer": Muon() if algorithm.__name__ == "LocalMuon" else SGD(0.1, momentum=0.5), **options}
    objective: LocalObjective = algorithm(net=golden.net(), parts=[part or Personal(HEAD)], **options)
    return objective


def equal(a: Run, b: Run) -> None:
    """Compares server, rows and bits."""
    for ours, theirs in ((a.server, b.server), *((row, b.clients.rows()[k]) for k, row in a.clients.rows().items())):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert a.clients.rows().keys() == b.clients.rows().keys() and a.state.total_bits == b.state.total_bits


@pytest.mark.sampled(quick=8, slow=2, start=1)
@pytest.mark.parametrize("name", [name for name in algorithms.__all__ if name not in AVERAGES_MOMENTS])
def test_what_stays_is_not_of_the_server(name: str, golden: Golden) -> None:
    """Kept coordinates are initial in the server's models, exactly 0 in duals and variates, and cost no bits."""
    run, record = golden.run(made(golden, getattr(algorithms, name)), max_rounds=3)
    objective, initial = run.objective, record.server[0].w[-OWN:]
    assert not torch.equal(record.server[1].w[:-OWN], record.server[0].w[:-OWN])
    rows = [row for clients in record.client for row in clients.values()]
    for values in (*record.server, *rows):
        vectors = {key: v[-OWN:] for key, v in values.items() if v.shape == (D,)}
        zeros = {key: v for key, v in vectors.items() if key not in objective.models and "." not in key}
        assert all(torch.equal(v, torch.zeros_like(v)) for v in zeros.values()), [*zeros]
        assert "w" not in vectors or torch.equal(vectors["w"], initial)
    assert all(not torch.equal(row.own, initial) for row in rows)
    uploads = [upload for result in record.local[0].values() for upload in result.upload.items()]
    up = [v.numel() for key, v in uploads if key not in objective.recalled]
    down = 2 * [run.server[key].numel() for key in objective.wire[0]]
    sizes = [D - OWN if size == D else size for size in down] + up
    assert {*sizes} <= {D - OWN, 1} and run.state.total_bits == 3 * 64 * objective.phases * sum(sizes)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_keep_all_is_local_training(engine: Any, golden: Golden) -> None:
    """It is to the bit: each participation of a client continues its last one; nothing travels, the server rests."""
    run, record = golden.run(made(golden, part=Personal(["*"])), engine=engine)
    w0, models = record.server[0].w, dict[int, Tensor]()
    assert torch.equal(run.server.w, w0) and not run.state.total_bits
    plain, _ = golden.run(FedAvg(golden.net(), optimizer=SGD(0.1, momentum=0.5)), engine=engine, max_rounds=1)
    for t, results in enumerate(record.local):
        starts = [(k, State({"w": models.get(k, w0)}), result.ctx) for k, result in results.items()]
        jobs = [Job(k, State({}), w, ctx, run.minibatches(k, ctx), 0) for k, w, ctx in starts]
        for alone in plain.engine.train(jobs):
            models[alone.client] = alone.w
            assert torch.equal(record.client[t][alone.client].own, alone.w)


def test_keep_all_under_rules_of_what_travels(golden: Golden) -> None:
    """Nothing does: there is no noise, and nothing to clip."""
    for name, rule in (("privacy", GaussianPrivacy(1.0, 1.0, delta=0.1)), ("aggregation", NormClipping(1.0))):
        objective = made(golden, part=Personal(["*"]), weighting="uniform")
        run, record = golden.run(objective, max_rounds=2, sampler=BernoulliSampler(0.5), **{name: rule})
        assert torch.equal(run.server.w, record.server[0].w) and "privacy/snr" not in run.metrics


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("algorithm", [FedAvg, algorithms.SCAFFOLD, algorithms.FedGMT, NaiveFedGloSS])
def test_keep_nothing_is_the_algorithm(algorithm: Any, golden: Golden) -> None:
    """It is to the bit; so is FedBN on a net without BatchNorm, which says so."""
    plain, _ = golden.run(algorithm(net=golden.net()))
    run, _ = golden.run(algorithm(net=golden.net(), parts=[Personal([])]))
    equal(run, plain)
    with pytest.warns(UserWarning, match="no parameter of this net stays with a client"):
        without = algorithm(net=golden.net(), parts=[Personal(["type:BatchNorm*"])])
    equal(golden.run(without)[0], plain)


def test_choices(golden: Golden) -> None:
    def size(**options: Any) -> int:
        return int(
            LocalObjective(golden.net(), parts=[Personal(**options)]).client_inits()["own"](torch.zeros(D)).numel()
        )

    assert size() == size(keep=["last:1"]) == size(share=["conv.*", "fc1.*"]) == size(keep=["*2*"]) == OWN
    assert size(share=["last:2"]) == D - OWN - 65 * 16 == size(keep=["type:Conv?d"])
    normed = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sequential(nn.BatchNorm1d(4))), nn.Linear(4, 2))
    part = LocalObjective(normed, parts=[Personal(["type:BatchNorm*"])], buffers="local").parts[0]
    assert part.client_state["own"](torch.arange(38.0)).tolist() == [*range(20, 28)]  # type: ignore[operator]
    with pytest.warns(UserWarning, match="all parameters stay with a client, so nothing is shared"):
        LocalObjective(nn.Linear(4, 4), parts=[Personal()])


@pytest.mark.parametrize("keep", ["last:1", "2.*", "type:Linear"])
def test_a_parameter_of_two_modules_has_both_names(keep: str) -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(3, 4), nn.LayerNorm(4))
    tied[2].weight = tied[0].weight
    net = nn.Sequential(nn.LayerNorm(4), *tied[:3])
    (part,) = LocalObjective(net, parts=[Personal([keep.replace("2", "3")])]).parts
    assert part.shared == ["0.weight", "0.bias"]  # type: ignore[attr-defined]


def test_a_single_client_is_fedavg(golden: Golden) -> None:
    """Its head is never reset; they agree to rounding, since the server adds the mean difference to its model."""
    sampler = ReplaySampler([[1]] * 5)
    _, plain = golden.run(FedAvg(net=golden.net()), sampler=sampler, max_rounds=5)
    _, record = golden.run(made(golden, optimizer=SGD()), sampler=sampler, max_rounds=5)
    for t in range(5):
        torch.testing.assert_close(record.local[t][1].w, plain.local[t][1].w, rtol=0, atol=1e-13)


def test_clients_in_another_order(golden: Golden) -> None:
    order, schedule = [2, 0, 3, 1], golden.schedule
    _, record = golden.run(made(golden))
    golden.arrays, golden.schedule = [golden.arrays[k] for k in order], [[order.index(k) for k in c] for c in schedule]
    _, permuted = golden.run(made(golden))
    for a, b in zip(record.server, permuted.server, strict=True):
        torch.testing.assert_close(a.w, b.w, rtol=0, atol=1e-13)
    for k, row in record.client[-1].items():
        torch.testing.assert_close(row.own, permuted.client[-1][order.index(k)].own, rtol=0, atol=1e-13)


@pytest.mark.parametrize("part", [Personal(HEAD), Personal(HEAD, epochs_alone=2), Ditto()])
def test_a_lost_client_leaves_its_row(part: Part, golden: Golden) -> None:
    """A run with it is the run whose sampler leaves it out, but for the bits that it has received."""
    run, record = golden.run(made(golden, part=part), faults=Faults(drop_after=0.3))
    answered = [[*local] for local in record.local]
    lost = [[k for k in cohort if k not in replied] for cohort, replied in zip(golden.schedule, answered, strict=True)]
    golden.schedule = answered
    without, reference = golden.run(made(golden, part=part))
    sent = D - OWN if isinstance(part, Personal) else D
    assert sum(map(len, lost)) and all(answered)
    assert [clients.keys() for clients in record.client] == [clients.keys() for clients in reference.client]
    assert all(
        torch.equal(row.own, reference.client[t][k].own) for t, c in enumerate(record.client) for k, row in c.items()
    )
    assert run.state.total_bits == without.state.total_bits + 64 * sent * sum(map(len, lost))
    assert torch.equal(run.server.w, without.server.w)


def test_refused(golden: Golden) -> None:
    for algorithm, optimizer in ((algorithms.FedMuon, Muon()), (algorithms.FedAdamW, None)):
        with pytest.raises(UserError, match=r"model\.parts: \w+ averages optimizers' states whole, so no client"):
            made(golden, algorithm, optimizer=optimizer)
    trainer = FederatedTrainer(accelerator="cpu", engine="sequential")
    for objective in (made(golden), made(golden, part=Ditto())):
        with pytest.raises(UserError, match=r"model\.parts = (Personal|Ditto): with Flower no client keeps a model"):
            check(trainer, objective, Digits())
        with pytest.raises(UserError, match=r"train it with `fl-lightning fit` or FederatedTrainer.fit, not centrally"):
            objective.check_centralized()
    private = {"privacy": GaussianPrivacy(1.0, 1.0, per_tensor=True, delta=0.1), "sampler": BernoulliSampler(0.5)}
    with pytest.raises(UserError, match=r"per_tensor = true: .* FedAvg uploads a part of it; set it to false"):
        golden.run(made(golden, weighting="uniform"), **private)
    for options, message in (
        ({"keep": [], "share": []}, "keep and share are both given; give one of them"),
        ({"keep": ["fc"]}, r"Personal\.keep = fc: matches none of conv\.weight"),
        ({"share": ["last:0"]}, r"Personal\.share = last:0: give a number of layers, such as last:1"),
    ):
        with pytest.raises(UserError, match=message):
            LocalObjective(golden.net(), parts=[Personal(**options)])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains FedPer over the quickstart's net."""
    root = tmp_path_factory.mktemp("done")
    return run("fit", f"--config={PRESETS / 'FedPer.yaml'}", "--trainer.callbacks+=FlatnessMonitor", root=root)


@pytest.mark.slow
def test_evaluation_of_a_checkpoint(done: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``test`` evaluates clients' own models, as training did; what needs a global model says that there is none."""
    checkpoint = str(done / "checkpoints/last.ckpt")
    final = {name: values[-1][1] for name, values in metrics(done).items()}
    cli("test", "--ckpt_path", checkpoint)
    shown = dict(re.findall(r"(server/\S+) (\S+)", capfd.readouterr().out))
    assert {name: float(value) for name, value in shown.items()} == {name: round(final[name], 4) for name in shown}
    assert {"server/clients/acc", "server/clients/acc_worst_decile", "server/unseen_clients/acc"} <= {*shown}
    assert not any(name.startswith("server/test") for name in final)
    for command, purpose in (("validate", "this command"), ("landscape", "a landscape"), ("flatness", "LPF")):
        options = ["--metrics=[LPF]"] if command == "flatness" else []
        with pytest.raises(SystemExit, match=f"so there is no global model for {purpose}; evaluate the clients' own"):
            cli(command, "--ckpt_path", checkpoint, *options)
    cli("flatness", "--ckpt_path", checkpoint, f"--out={done / 'flat'}")  # what suits this model
    report = json.loads((done / "flat/flatness.json").read_text())
    assert "lambda_max" in str(report) and "discrepancy" not in str(report)


class Users(Personal):
    """That of somebody else."""


@pytest.mark.parametrize("parts", [("Personal",), (f"{__name__}.Users", "Compress")], ids=["Personal", "Users"])
def test_a_landscape_compares_no_run_without_a_global_model(parts: Sequence[str], tmp_path: Path) -> None:
    """Its server has the initial values of what stays with the clients."""
    plain = run("fit", root=tmp_path / "plain") / "checkpoints/last.ckpt"
    personal = (
        run("fit", *(f"--model.parts+={part}" for part in parts), root=tmp_path / "own") / "checkpoints/last.ckpt"
    )
    for args in (
        ["interpolate", str(plain), str(personal)],
        ["landscape", "--ckpt_path", str(plain), f"--compare=[{personal}]"],
    ):
        with pytest.raises(SystemExit, match=r"last\.ckpt: some weights stay with each client, so there is no global"):
            cli(*args)


def loss_by_class(golden: Golden, net: nn.Module, k: int) -> float:
    """Returns the loss on the test set, each class weighted by its share of the client's data."""
    x, y = torch.as_tensor(golden.test[0]).double(), torch.as_tensor(golden.test[1]).long()
    losses = nn.functional.cross_entropy(net(x), y, reduction="none")
    counts = torch.bincount(torch.as_tensor(golden.arrays[k][1]).long(), minlength=4).double()
    return float(counts / counts.sum() @ torch.stack([losses[y == c].mean() for c in range(4)]))


def test_export(done: Path, tmp_path: Path) -> None:
    """A client's own model has what is shared from the server, and what stays from its row."""
    checkpoint, content = str(done / "checkpoints/last.ckpt"), last(done)
    client = int(content["clients"]["ids"][-1])
    cli("export", checkpoint, str(tmp_path / "net.pt"), "--client", str(client))
    net = torch.load(tmp_path / "net.pt")
    assert torch.equal(
        torch.cat([net[name].flatten() for name in net if name.startswith("3.")]), content["clients"]["rows"]["own"][-1]
    )
    assert all(
        torch.equal(v, content["state_dict"][f"net.{name}"]) for name, v in net.items() if not name.startswith("3.")
    )
    for options, message in (([], "no global model for export; give --client k"), (["--client=9"], "has not trained")):
        with pytest.raises(SystemExit, match=message):
            cli("export", checkpoint, str(tmp_path / "other.pt"), *options)


@pytest.mark.parametrize("policy", ["local", "average"])
def test_own_statistics(policy: Any, golden: Golden) -> None:
    """FedBN: a client's own model is evaluated with the statistics that it keeps."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    objective = LocalObjective(net, optimizer=SGD(0.1), buffers=policy, parts=[Personal(["type:BatchNorm*"])])
    run, _ = golden.run(objective, max_rounds=2)
    losses = []
    for k, row in run.clients.rows().items():
        run.net.move_to(objective.client_model(run.server.w, row))
        objective.net_buffers.load(net, row.buffers if policy == "local" else run.server.buffers)  # type: ignore[union-attr]
        losses.append(loss_by_class(golden, net.double().eval(), k))
    assert run.metrics["server/clients/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_own_statistics_are_evaluated_by_a_monitor(golden: Golden) -> None:
    """This is FedBN with the measure that its page recommends."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    objective = LocalObjective(net, optimizer=SGD(0.1), buffers="local", parts=[Personal(["type:BatchNorm*"])])
    run, _ = golden.run(objective, max_rounds=1, callbacks=[FlatnessMonitor(1, [ClientEvaluation()])])
    assert (run.folder.path / "client_evaluation.csv").exists()


def test_no_own_model_is_normalized_by_what_it_is_tested_on(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither new ones after adaptation are, nor local ones."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    objective = LocalObjective(net, optimizer=SGD(0.1), buffers="local", parts=[Personal(["type:BatchNorm*"])])
    monitor = FlatnessMonitor(1, [ClientEvaluation(local_models=True, adapt_epochs=1)])
    outputs, by_batches = Evaluator._outputs, list[bool]()

    def recorded(self: Any, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        by_batches.append(self.by_batch)
        return outputs(self, w, x, y)

    monkeypatch.setattr(Evaluator, "_outputs", recorded)
    run, _ = golden.run(
        objective, max_rounds=1, callbacks=[monitor], sampler=UniformSampler(2, held_out=2), local_steps=3
    )
    assert {"client/adapted/loss", "client/test/loss"} <= run.metrics.keys() and not any(by_batches)


def test_nothing_shared_has_no_shared_curvature(golden: Golden) -> None:
    run, _ = golden.run(made(golden, part=Personal(["*"])), max_rounds=1, callbacks=[FlatnessMonitor(1)])
    assert not [name for name in run.metrics if "lambda" in name]
    for measure in (LambdaMax(), LambdaMax(by_layer=True)):
        with pytest.raises(UserError, match=r"LambdaMax: all weights stay with clients; take ClientLambdaMax"):
            golden.run(made(golden, part=Personal(["*"])), max_rounds=1, callbacks=[FlatnessMonitor(1, [measure])])
    with pytest.raises(UserError, match=r"^measure: split = test: clients' own models are measured on train$"):
        golden.run(made(golden), max_rounds=2, callbacks=[FlatnessMonitor(2, [LambdaMax(split="test")])])


def test_no_more_eigenvalues_than_shared_weights(golden: Golden) -> None:
    d = sum(p.numel() for name, p in golden.net().named_parameters() if name.endswith("bias"))
    message = rf"^measure: Spectrum\.k = {d + 1}: the shared part has {d} weights; give at most {d}$"
    monitor = FlatnessMonitor(1, [Spectrum(k=d + 1)])
    with pytest.raises(UserError, match=message):
        golden.run(made(golden, part=Personal(["*.weight"])), max_rounds=1, callbacks=[monitor])


def test_graphs_of_many_clients_have_one_budget(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are the same to the bit."""
    values = [
        golden.run(made(golden), max_rounds=2, callbacks=[FlatnessMonitor(2, [LambdaMax()])])[0].metrics
        for _ in range(2)
        if monkeypatch.setattr(curvature, "KEEP_BYTES", 1 if _ else 2**30) is None
    ]
    assert values[0]["flatness/lambda_max"] == values[1]["flatness/lambda_max"]


# Training before the round, by oneself


class Phases(Callback):
    """Local results in the order of their ends."""

    def __init__(self) -> None:
        self.results: list[LocalResult] = []

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        self.results.append(result)


RULES = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}


def steps(golden: Golden, k: int, w: Tensor, names: str, n: int, pull: float = 0.0, to: Tensor | None = None) -> Tensor:
    """Takes steps by torch.optim.SGD of the parameters whose names match, on all data of a client."""
    net = golden.net().double()
    nn.utils.vector_to_parameters(w.clone(), net.parameters())
    anchors = [] if to is None else to.split([p.numel() for p in net.parameters()])
    optimizer = torch.optim.SGD([p for name, p in net.named_parameters() if re.match(names, name)], **RULES)
    x, y = golden.arrays[k]
    for _ in range(n):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.as_tensor(x).double()), torch.as_tensor(y).long())
        loss = loss + sum(pull / 2 * ((p.flatten() - a) ** 2).sum() for p, a in zip(net.parameters(), anchors))  # noqa: B905
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


@pytest.mark.parametrize("engine", ENGINES)
def test_fedrep(engine: Any, golden: Golden) -> None:
    """Head, then body train by torch's SGD; what is frozen is bitwise unchanged, and steps are those of both."""
    part, phases = Personal(HEAD, epochs_alone=2), Phases()
    objective = made(golden, part=part, optimizer=SGD(**RULES))
    run, record = golden.run(objective, max_rounds=4, engine=engine, callbacks=[phases])
    heads, w = dict[int, Tensor](), record.server[0].w
    first = w[-OWN:]
    for t in range(4):
        for k, body in record.local[t].items():
            (head,) = (r for r in phases.results if r.client == k and r.ctx.t == t and r.ctx.phase == 1)
            assert torch.equal(head.w[:-OWN], record.server[t].w[:-OWN]) and not head.upload
            assert torch.equal(head.w[-OWN:], body.w[-OWN:]) and torch.equal(body.state.own, body.w[-OWN:])
            assert (head.ctx.K, body.ctx.K) == (2, 3)
            model = steps(golden, k, torch.cat([w[:-OWN], heads.get(k, first)]), "fc2", 2)
            heads[k] = model[-OWN:]
            torch.testing.assert_close(body.w, steps(golden, k, model, "conv|fc1", 3), rtol=0, atol=1e-12)
        w = record.server[t + 1].w
    participations = sum(len(c) for c in golden.schedule[:4])
    assert (run.metrics["client/steps"], run.metrics["client/passes"]) == (participations * 5, participations * 10)
    assert run.state.total_bits == 64 * 2 * (D - OWN) * participations


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_ditto(engine: Any, golden: Golden) -> None:
    """The global path is FedAvg's to the bit; each client's own model is that of torch's SGD with the pull."""
    options: dict[str, Any] = {"max_rounds": 4, "engine": engine}
    plain, _ = golden.run(FedAvg(golden.net(), optimizer=SGD(**RULES)), **options)
    for lam in (0.0, 2.0):
        run, record = golden.run(made(golden, part=Ditto(lam), optimizer=SGD(**RULES)), **options)
        assert torch.equal(run.server.w, plain.server.w) and run.state.total_bits == plain.state.total_bits
        own_models = dict[int, Tensor]()
        for t, cohort in enumerate(golden.schedule[:4]):
            for k in cohort:
                received = record.server[t].w
                own_models[k] = steps(golden, k, own_models.get(k, record.server[0].w), "", 3, lam, received)
                torch.testing.assert_close(record.client[t][k].own, own_models[k], rtol=0, atol=1e-12)
        assert {"server/test/acc", "server/clients/acc"} <= {*run.metrics}


def gradient_at(net: nn.Module, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    net.zero_grad()
    nn.utils.vector_to_parameters(v.clone(), net.parameters())
    nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("engine", ENGINES)
def test_ditto_with_sam_on_both_models(engine: Any, golden: Golden) -> None:
    """``v <- v - lr (g(v + rho g / ||g||) + lam (v - w^t))``; the global path is that of SAM clients, to the bit."""
    options: dict[str, Any] = {"max_rounds": 2, "engine": engine, "local_steps": 2}
    rules: dict[str, Any] = {"optimizer": SGD(0.1), "ascent": SAM(0.5)}
    run, record = golden.run(made(golden, part=Ditto(2.0, sam=True), **rules), **options)
    plain, _ = golden.run(FedAvg(golden.net(), **rules), **options)
    assert torch.equal(run.server.w, plain.server.w)
    for name, times in (("steps", 2), ("passes", 2)):
        assert run.metrics[f"client/{name}"] == times * plain.metrics[f"client/{name}"]
    net, own_models = golden.net().double(), dict[int, Tensor]()
    for t, cohort in enumerate(golden.schedule[:2]):
        for k in cohort:
            x, y = torch.as_tensor(golden.arrays[k][0]).double(), torch.as_tensor(golden.arrays[k][1]).long()
            v, received = own_models.get(k, record.server[0].w), record.server[t].w
            for _ in range(2):
                g = gradient_at(net, v, x, y)
                v = v - 0.1 * (gradient_at(net, v + 0.5 * g / g.norm(), x, y) + 2.0 * (v - received))
            own_models[k] = v
            torch.testing.assert_close(record.client[t][k].own, v, rtol=0, atol=1e-12)


def test_ditto_with_sam_needs_one(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"Ditto\.sam = true: FedAvg has no SAM or ASAM; set model\.ascent"):
        made(golden, part=Ditto(sam=True))


def test_one_stream_of_minibatches(golden: Golden) -> None:
    """FedRep's head takes the first epochs of a client, its body the next ones."""
    data, phases = Digits(num_clients=4, batch_size=20), Phases()
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=2, local_epochs=2, callbacks=[phases], accelerator="cpu", threads=1,
        enable_progress_bar=False, default_root_dir=str(golden.folder),
    )  # fmt: skip
    run = trainer.fit(FedAvg(DigitsMLP(hidden=4), parts=[Personal(epochs_alone=3)]), data)
    pairs = [
        (head, body)
        for head, body in product(phases.results, repeat=2)
        if (head.client, head.ctx.t, head.ctx.phase) == (body.client, body.ctx.t, body.ctx.phase + 1)
    ]
    assert len(pairs) == 4
    for head, body in pairs:
        streams = [run.minibatches(result.client, result.ctx) for result in (head, body)]
        draw = generator(0, "batches", head.ctx.t, 0, head.client)
        expected = data.client_batches(head.client, 5, None, draw, torch.float32)
        assert torch.equal(torch.cat([stream.indices for stream in streams]), expected.indices)
        assert [len(stream) for stream in streams] == [head.ctx.K, body.ctx.K] and 2 * head.ctx.K == 3 * body.ctx.K


def test_ditto_of_no_pull_is_local_training(golden: Golden) -> None:
    """It is to the bit that of keeping everything, whose minibatches are the same."""
    _, record = golden.run(made(golden, part=Ditto(0.0)))
    _, alone = golden.run(made(golden, part=Personal(["*"])))
    assert all(torch.equal(row.own, alone.client[-1][k].own) for k, row in record.client[-1].items())


def test_ditto_at_the_longest_step(golden: Golden) -> None:
    """With lr lam = 1 it is ``v <- w^t - lr g(v)``."""
    _, record = golden.run(made(golden, part=Ditto(10.0), optimizer=SGD(0.1)), local_steps=1)
    w0 = record.server[0].w
    for k in golden.schedule[0]:
        grown = record.client[0][k].own - w0
        torch.testing.assert_close(grown, record.local[0][k].w - w0, rtol=0, atol=1e-13)


def test_training_alone_starts_afresh(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"optimizer\.state = keep: model\.parts trains each client before the round"):
        made(golden, part=Ditto(), optimizer=SGD(0.1, momentum=0.5, state="keep"))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_new_clients(engine: Any, golden: Golden) -> None:
    """They are evaluated as they are, and after epochs of the head alone by torch's SGD; nothing is kept."""
    sampler, monitor = UniformSampler(2, held_out=2), FlatnessMonitor(3, [ClientEvaluation(adapt_epochs=4)])
    options: dict[str, Any] = {"sampler": sampler, "max_rounds": 3, "engine": engine}
    run, _ = golden.run(made(golden, optimizer=SGD(**RULES)), callbacks=[monitor], **options)
    plain, _ = golden.run(made(golden, optimizer=SGD(**RULES)), **options)
    equal(run, plain)
    assert run.clients.rows().keys() == {0, 1}
    net, losses = golden.net().double(), dict[str, list[float]](unseen=[], adapted=[])
    for k in (2, 3):
        for name, w in (("unseen", run.server.w), ("adapted", steps(golden, k, run.server.w, "fc2", 4))):
            nn.utils.vector_to_parameters(w.clone(), net.parameters())
            losses[name].append(loss_by_class(golden, net, k))
    assert run.metrics["server/unseen_clients/loss"] == pytest.approx(sum(losses["unseen"]) / 2, abs=1e-12)
    assert run.metrics["client/adapted/loss"] == pytest.approx(sum(losses["adapted"]) / 2, abs=1e-12)
    assert sum(losses["adapted"]) < sum(losses["unseen"])


def test_a_new_client_whose_model_is_not_finite_is_left_out(golden: Golden) -> None:
    class Wild(Personal):
        def direction_alone(self, w: Tensor, g: Tensor, received: Any) -> Tensor:
            return g * (float("nan") if g.norm() > 1e3 else 1.0)

    golden.arrays[3] = (golden.arrays[3][0] * 1e6, golden.arrays[3][1])
    sampler, monitor = UniformSampler(2, held_out=2), FlatnessMonitor(1, [ClientEvaluation(adapt_epochs=4)])
    objective = made(golden, part=Wild(HEAD), optimizer=SGD(**RULES))
    run, _ = golden.run(objective, callbacks=[monitor], sampler=sampler, max_rounds=1)
    net = golden.net().double()
    nn.utils.vector_to_parameters(steps(golden, 2, run.server.w, "fc2", 4), net.parameters())
    assert run.metrics["client/adapted/loss"] == pytest.approx(loss_by_class(golden, net, 2), abs=1e-12)


# SAM


@pytest.mark.parametrize("engine", ENGINES)
def test_perturbed_weights(engine: Any, golden: Golden) -> None:
    """``g(w + rho P g / ||P g||)``: the radius is that of the perturbed weights; all weights move."""
    net, rho, w0 = (
        golden.net().double(),
        0.5,
        nn.utils.parameters_to_vector(golden.net().double().parameters()).detach(),
    )
    k, masks = golden.schedule[0][0], dict[str, Tensor](all=torch.ones(D), kept=torch.arange(D) >= D - OWN)
    masks["shared"] = ~masks["kept"]
    x, y = torch.as_tensor(golden.arrays[k][0]).double(), torch.as_tensor(golden.arrays[k][1]).long()

    def g(v: Tensor) -> Tensor:
        return gradient_at(net, v, x, y)

    models = {}
    for perturb, mask in masks.items():
        part = Personal(HEAD, perturb=perturb)  # type: ignore[arg-type]
        objective = made(golden, part=part, optimizer=SGD(0.1), ascent=SAM(rho))
        _, record = golden.run(objective, local_steps=1, max_rounds=1, engine=engine)
        masked = mask * g(w0)
        models[perturb] = record.local[0][k].w
        expected = w0 - 0.1 * g(w0 + rho * masked / masked.norm())
        torch.testing.assert_close(models[perturb], expected, rtol=0, atol=1e-12)
    assert all((models["shared"] - models[name]).abs().max() > 1e-4 for name in ("all", "kept"))


def test_alternation_with_a_radius_of_zero(golden: Golden) -> None:
    """It is FedRep; nothing kept is FedAvg whatever else is set."""
    fedrep, _ = golden.run(made(golden, part=Personal(HEAD, epochs_alone=1)))
    run, _ = golden.run(made(golden, part=Personal(HEAD, epochs_alone=1), ascent=SAM(0.0)))
    torch.testing.assert_close(run.server.w, fedrep.server.w, rtol=0, atol=1e-12)
    fedavg, _ = golden.run(FedAvg(golden.net(), ascent=SAM(0.1)))
    equal(golden.run(FedAvg(golden.net(), ascent=SAM(0.1), parts=[Personal([], epochs_alone=3)]))[0], fedavg)


# Flatness


@pytest.mark.slow
def test_flatness(golden: Golden) -> None:
    """Dense Hessians agree: of each client's own model, and as the block of the weighted sum for what is shared."""
    measures = [
        ClientLambdaMax(clients="own", tol=1e-6),
        HessianTrace(probes=5, samples=None),
        Spectrum(k=1, samples=None),
    ]
    monitor = FlatnessMonitor(3, [*measures, LambdaMax(samples=None, parameters=["fc1.bias"], tol=1e-9)])
    options: dict[str, Any] = {"callbacks": [monitor], "max_rounds": 3, "sampler": UniformSampler(2, held_out=1)}
    run, _ = golden.run(made(golden, optimizer=SGD(**RULES)), **options)
    net, names = golden.net().double(), ["fc1.bias"]

    def dense(k: int, w: Tensor, parameters: list[str]) -> Tensor:
        nn.utils.vector_to_parameters(w.clone(), net.parameters())
        weights, x = dict(net.named_parameters()), torch.as_tensor(golden.arrays[k][0]).double()
        shapes = [weights[name].shape for name in parameters]

        def loss(v: Tensor) -> Tensor:
            parts = dict(
                zip(parameters, (p.view(s) for p, s in zip(v.split([s.numel() for s in shapes]), shapes, strict=True)))  # noqa: B905
            )
            z = torch.func.functional_call(net, {**weights, **parts}, (x,))
            return nn.functional.cross_entropy(z, torch.as_tensor(golden.arrays[k][1]).long())

        return torch.func.hessian(loss)(torch.cat([weights[name].detach().flatten() for name in parameters]))  # type: ignore[no-any-return]

    rows = run.clients.rows()
    models = {k: torch.cat([run.server.w[:-OWN], row.own]) for k, row in rows.items()}
    sizes = torch.tensor([len(golden.arrays[k][1]) for k in models], dtype=torch.float64)
    block = sum(p * dense(k, w, names) for p, (k, w) in zip(sizes / sizes.sum(), models.items(), strict=True))
    top = float(torch.linalg.eigvalsh(block)[-1])
    assert run.metrics["flatness/fc1_bias_lambda_max"] == pytest.approx(top, rel=1e-6)
    everything = [name for name, _ in net.named_parameters()]
    tops = [float(torch.linalg.eigvalsh(dense(k, w, everything))[-1]) for k, w in models.items()]
    assert run.metrics["flatness/client_lambda_max_local_own"] == pytest.approx(sum(tops) / len(tops), rel=1e-4)
    assert run.metrics["flatness/client_lambda_max_local_own_max"] == pytest.approx(max(tops), rel=1e-4)
    assert run.metrics["flatness/lambda_1"] > 0 and "flatness/trace" in run.metrics


def test_robust_rules_and_noise_act_on_what_is_shared(golden: Golden) -> None:
    """The server keeps the initial values of what stays; so do corrupted uploads."""
    corrupt = Faults(corrupt=Corrupt(share=0.5, kind="sign_flip", factor=3.0))
    private = {"privacy": GaussianPrivacy(1.0, 1.0, delta=0.1), "sampler": BernoulliSampler(0.5)}
    rules: list[dict[str, Any]] = [{"aggregation": CoordinateMedian()}, {"aggregation": NormClipping(0.5)}, private]
    for options in rules:
        run, record = golden.run(made(golden, weighting="uniform"), max_rounds=3, faults=corrupt, **options)
        first = record.server[0].w
        assert torch.equal(run.server.w[-OWN:], first[-OWN:])
        assert not torch.equal(run.server.w[:-OWN], first[:-OWN])
        if "aggregation" in options:  # nothing to combine
            alone, record = golden.run(made(golden, part=Personal(["*"])), max_rounds=1, **options)
            assert torch.equal(alone.server.w, record.server[0].w)


def test_an_optimizer_of_torch_freezes_as_well(golden: Golden) -> None:
    options = {"momentum": 0.5, "weight_decay": 0.01}
    optimizers = (SGD(0.1, **options), TorchOptimizer("SGD", lr=0.1, options=options))
    part = Personal(HEAD, epochs_alone=2)
    one, other = (golden.run(made(golden, part=part, optimizer=optimizer), max_rounds=3)[0] for optimizer in optimizers)
    torch.testing.assert_close(one.server.w, other.server.w, rtol=0, atol=1e-13)
    for k, row in one.clients.rows().items():
        torch.testing.assert_close(row.own, other.clients.rows()[k].own, rtol=0, atol=1e-13)
