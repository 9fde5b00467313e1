"""The orchestrator: cohorts, weights of the average, refused uploads, counted passes, precision, evaluation."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    ASAM,
    IID,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    Arrays,
    BernoulliSampler,
    Callback,
    Digits,
    DigitsMLP,
    Discrepancy,
    FedAvg,
    FederatedTrainer,
    FedGMTv2,
    FedSAM,
    FedSMOO,
    FlatnessMonitor,
    LambdaMax,
    LocalObjective,
    Personal,
    ReplaySampler,
    UniformSampler,
    UserError,
    algorithms,
    load_net,
)
from fl_lightning.algorithms.parts.local_optimizer import Cosine
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.losses import kl_to_teacher
from fl_lightning.core.state import ClientContext, RoundContext, State
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage.client_store import ClientStore
from tests.catalogue import Entry
from tests.problem import Golden


def digits_run(folder: Path, objective: LocalObjective, rounds: int = 3, **options: Any) -> Run:
    torch.manual_seed(0)
    options = {"clients_per_round": 4, "accelerator": "cpu", "enable_progress_bar": False, **options}
    trainer = FederatedTrainer(max_rounds=rounds, default_root_dir=str(folder), **options)
    return trainer.fit(objective, Digits(num_clients=20, partition=IID()))


# Cohorts


def test_uniform_cohorts() -> None:
    draws = [UniformSampler(5)(t, 20, seed=1) for t in range(2000)]
    assert all(len(set(c)) == 5 and set(c) <= set(range(20)) for c in draws)
    counts = Counter(k for c in draws for k in c)
    assert min(counts.values()) > 400 and max(counts.values()) < 600  # 500 each, sd 19
    assert draws[:50] == [UniformSampler(5)(t, 20, seed=1) for t in range(50)]
    assert draws[:50] != [UniformSampler(5)(t, 20, seed=2) for t in range(50)]
    assert len(set(map(tuple, draws))) > 1500


def test_bernoulli_cohorts() -> None:
    """The number varies, and nobody at all is drawn again."""
    sizes = [len(BernoulliSampler(0.1)(t, 20, seed=0)) for t in range(2000)]
    assert min(sizes) == 1 and max(sizes) > 4
    assert sum(sizes) / len(sizes) == pytest.approx(2 / (1 - 0.9**20), abs=0.15)


def test_trace_from_a_file(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(golden.schedule))
    from_file, from_list = (
        golden.run(FedAvg(net=golden.net()), sampler=ReplaySampler(source))[1]
        for source in (str(tmp_path / "trace.json"), golden.schedule)
    )
    assert [list(r) for r in from_file.local] == golden.schedule
    assert torch.equal(from_file.server[-1].w, from_list.server[-1].w)
    (tmp_path / "trace.json").write_text("{}[")
    with pytest.raises(UserError, match="not a JSON list"):
        ReplaySampler(str(tmp_path / "trace.json"))
    with pytest.raises(UserError, match=r"rounds\[1\] = \[4\].*0 to 3"):
        ReplaySampler([[0], [4]]).check(2, 4)


def test_a_million_clients_cost_nothing() -> None:
    cohort = UniformSampler(10)(0, 1_000_000, seed=0)
    store = ClientStore({"c": "zeros"}, torch.zeros(3))
    for k in cohort:
        store.stage({k: store.get(k, torch.zeros(3)).replace(c=torch.full((3,), float(k)))})
    assert len(store) == 10 and store.get(cohort[3], torch.zeros(3)).c[0] == cohort[3]


def test_state_at_first_contact() -> None:
    rules: Any = {"a": "zeros", "b": "w0", "c": "w", "d": 2.0, "e": lambda w0: w0.new_ones(4)}
    first = State.initial(rules, w0=torch.ones(3), w=torch.full((3,), 5.0))
    assert [v.tolist() for v in first.values()] == [[0] * 3, [1] * 3, [5] * 3, [2], [1] * 4]
    with pytest.raises(AttributeError, match="no state 'lamb' here; there are: a, b"):
        first.replace(lamb=torch.ones(3))
    with pytest.raises(AttributeError, match="no state 'x'"):
        _ = first.x
    with pytest.raises(UserError, match="'zero': give 'zeros'"):
        State.initial({"a": "zero"}, torch.ones(3), torch.ones(3))


# A round


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_of_the_average(golden: Golden, weighting: Any) -> None:
    _, record = golden.run(FedAvg(net=golden.net(), weighting=weighting))
    sizes = [24, 32, 40, 24]
    for t, results in enumerate(record.local):
        p = torch.tensor([sizes[k] if weighting == "samples" else 1 for k in results], dtype=torch.float64)
        mean = (p[:, None] * torch.stack([r.w for r in results.values()])).sum(0) / p.sum()
        torch.testing.assert_close(record.server[t + 1].w, mean, rtol=0, atol=1e-13)


def test_clients_see_only_what_is_sent(golden: Golden) -> None:
    class Peeping(SCAFFOLD):
        down = ("w",)

    with pytest.raises(AttributeError, match="no state 'c' here; there are: w"):
        golden.run(Peeping(net=golden.net()))

    class Chatty(FedAvg):
        def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Any:
            return {"w": w, "secret": w}, client

    with pytest.raises(UserError, match=r"uploads .*secret.*declares up"):
        golden.run(Chatty(net=golden.net()))


def test_an_upload_that_is_not_finite_is_refused(golden: Golden) -> None:
    """Neither the average nor that client's row is written; it is counted; if nobody is left the run says so."""

    class Broken(SCAFFOLD):
        def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Any:
            upload, client = super().local_end(w, client, received, ctx)
            bad = ctx.t == 1 and ctx.n_k == 40  # client 2
            return {**upload, "w": w * float("nan")} if bad else upload, client

    class Refusals(Callback):
        def __init__(self) -> None:
            self.counts: list[float] = []

        def on_round_logged(self, run: Run, metrics: Any) -> None:
            self.counts.append(metrics["client/refused"])

    refusals = Refusals()
    _, record = golden.run(Broken(net=golden.net()), callbacks=[refusals])
    assert refusals.counts == [0, 1, 0, 0, 0, 0]
    assert (
        torch.equal(record.server[2].w, record.server[1].w + (record.local[1][1].w - record.server[1].w))
        or (record.server[2].w - record.local[1][1].w).abs().max() < 1e-14
    )
    assert 2 not in record.client[1] and 2 in record.client[2]
    assert all(s.finite() for s in record.server)


def test_state_after_a_broken_round_is_that_before(golden: Golden) -> None:
    class Stop(Callback):
        def on_local_end(self, run: Run, result: LocalResult) -> None:
            if result.ctx.t == 2 and result.client == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        golden.run(SCAFFOLD(net=golden.net()), callbacks=[Stop()])
    reference = golden.run(SCAFFOLD(net=golden.net()))[1]
    (saved,) = golden.folder.glob("*/version_0/checkpoints/last.ckpt")
    state = torch.load(saved, weights_only=True)
    assert state["round"] == 2
    assert torch.equal(state["server"]["w"], reference.server[2].w)
    assert torch.equal(state["clients"]["rows"]["c"], torch.stack([reference.client[1][k].c for k in (0, 1, 2)]))


SCALARS = {"FedNova": 1, "FedGF": 2, "FedExP": 1, "FedWMSAM": 2, "FedAdamW": 1}
COSTS = {
    # models down and up, forward and backward passes a step: the papers' tables; of others what the class declares
    "FedAvg": (1, 1, 1, 1), "FedProx": (1, 1, 1, 1), "FedAvgM": (1, 1, 1, 1), "FedAdam": (1, 1, 1, 1),
    "FedYogi": (1, 1, 1, 1), "FedAdagrad": (1, 1, 1, 1), "SCAFFOLD": (2, 2, 1, 1), "FedCM": (2, 1, 1, 1),
    "FedDyn": (1, 1, 1, 1), "FedSAM": (1, 1, 2, 2), "FedASAM": (1, 1, 2, 2), "MoFedSAM": (2, 1, 2, 2),
    "FedGAMMA": (2, 2, 2, 2), "FedSpeed": (1, 1, 2, 2), "FedSMOO": (2, 2, 2, 2), "FedLESAM": (1, 1, 1, 1),
    "FedLESAMD": (1, 1, 1, 1), "FedLESAMS": (2, 2, 1, 1), "FedNTD": (1, 1, 2, 1), "FedGMT": (2, 1, 2, 1),
    "FedGMTv2": (1, 1, 2, 1), "FedNova": (1, 1, 1, 1), "FedGF": (2, 1, 2, 2), "FedGloSS": (1, 1, 1, 1),
    "NaiveFedGloSS": (2, 2, 2, 2), "AdaBest": (1, 1, 1, 1),
    "STildeAM": (1, 1, 1, 1),
    "MOON": (1, 1, 3, 1), "FedACG": (1, 1, 1, 1), "FedNSAM": (1, 1, 2, 2), "FedExP": (1, 1, 1, 1),
    "FedLC": (1, 1, 1, 1), "FedDecorr": (1, 1, 1, 1), "FedSWA": (1, 1, 1, 1), "FedMoSWA": (2, 2, 1, 1),
    "FedWMSAM": (3, 2, 1, 1), "FedSOL": (1, 1, 3, 2), "AFedPD": (2, 1, 1, 1), "AFedPDSAM": (2, 1, 2, 2),
    "FedTOGA": (2, 1, 2, 2), "FedScar": (2, 1, 2, 2), "FedScarl": (2, 1, 2, 2), "FedScar4": (1, 2, 1, 1),
    "LocalMuon": (1, 1, 1, 1), "FedMuon": (3, 2, 1, 1), "FedAdamW": (3, 2, 1, 1),
}  # fmt: skip


def costs(name: str) -> tuple[int, ...]:
    """Models down and up, forward and backward passes a step, scalars."""
    if name in COSTS:
        return *COSTS[name], SCALARS.get(name, 0)
    entry = Entry.of(getattr(algorithms, name))
    return *entry.models, *entry.passes, entry.scalars


def numbers(name: str, flat: FlatSpec) -> int:
    """How many numbers a client receives and uploads; FedMuon's momentum is that of matrices only."""
    vectors = sum(n for shape, n in zip(flat.shapes, flat.numels, strict=True) if len(shape) < 2)
    down, up, *_, scalars = costs(name)
    return (down + up) * flat.d + scalars - (2 * vectors if name == "FedMuon" else 0)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_passes_and_wire_are_what_is_declared(golden: Golden, name: str) -> None:
    """Floats that really went and passes that were really made are counted; NaiveFedGloSS makes each step twice."""
    objective = getattr(algorithms, name)(net=golden.net())
    calls, counted = Counter[str](), list[tuple[int, int]]()

    class Count(Callback):
        def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
            gradient = run.net.gradient

            def counting(loss: torch.Tensor) -> torch.Tensor:
                calls["backward"] += 1
                return gradient(loss)

            run.net.gradient = counting  # type: ignore[method-assign]
            run.objective.net.register_forward_hook(lambda *_: calls.update(["forward"]))

        def on_local_end(self, run: Run, result: LocalResult) -> None:
            counted.append((calls["forward"], calls["backward"]))

    run, _ = golden.run(objective, callbacks=[Count()], sampler=ReplaySampler([[0, 1]]), max_rounds=1)
    _, _, forwards, backwards, _ = costs(name)
    (f0, b0), (f1, b1) = counted[0], counted[-1]
    others = 2 * objective.phases - 1  # trainings between the two counts
    passes = (f1 - f0) / 3 / others * objective.phases, (b1 - b0) / 3 / others * objective.phases
    assert passes == (forwards, backwards)
    assert tuple(n * objective.phases for n in run.contract[0].passes) == (forwards, backwards)
    assert run.metrics["comm/total_bits"] == numbers(name, objective.flat) * 64 * 2


def test_results_do_not_depend_on_the_global_generator(tmp_path: Path) -> None:
    """Dropout does not, either; and monitoring changes nothing."""

    class Disturb(Callback):
        def on_local_end(self, run: Run, result: LocalResult) -> None:
            torch.randn(7)

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 10))

    plain = digits_run(tmp_path, FedAvg(net=net()))
    watched = digits_run(tmp_path, FedAvg(net=net()), callbacks=[Disturb(), FlatnessMonitor(every_n_rounds=1)])
    assert torch.equal(plain.server.w, watched.server.w)
    reseeded = digits_run(tmp_path, FedAvg(net=net()), seed=1)
    assert not torch.equal(plain.server.w, reseeded.server.w)


@pytest.mark.slow
def test_composition_learns(tmp_path: Path) -> None:
    """SCAFFOLD + ASAM + SWA with a schedule, a clip and momentum; accuracy is that of the average."""
    optimizer = SGD(lr=0.2, momentum=0.5, clip=5.0, schedule=Cosine(0.1))
    objective = SCAFFOLD(net=DigitsMLP(), optimizer=optimizer, ascent=ASAM(0.3), averaging=SWA(start=0.5))
    run = digits_run(tmp_path, objective, rounds=20, eval_every=5)
    assert run.metrics["server/test/acc"] > 0.85
    final = run.evaluate("test", run.global_model)
    assert final == {k: v for k, v in run.metrics.items() if k.startswith("server/test")}
    assert torch.equal(objective.flat.vector(objective.net), run.global_model)
    assert not torch.equal(run.global_model, run.server.w)


@pytest.mark.slow
def test_bf16_mixed_keeps_float32_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    run = digits_run(tmp_path, FedSMOO(net=DigitsMLP(), optimizer=SGD(lr=0.3)), rounds=15, precision="bf16-mixed")
    exact = digits_run(tmp_path, FedSMOO(net=DigitsMLP(), optimizer=SGD(lr=0.3)), rounds=15)
    assert {v.dtype for v in run.server.values()} == {torch.float32}
    assert run.metrics["server/test/acc"] > 0.8
    assert not torch.equal(run.server.w, exact.server.w)


def test_clip_acts_on_the_corrected_direction() -> None:
    flat = FlatSpec(nn.Linear(1, 1))
    sgd, w, ctx = SGD(clip=1.0, weight_decay=0.5), torch.ones(2), ClientContext(0, 1, 1, flat)
    step, _ = sgd.step(w, torch.tensor([3.0, 4.0]), State({}), 1.0, ctx)
    torch.testing.assert_close(step, w - torch.tensor([0.6, 0.8]) - 0.5 * w, rtol=0, atol=1e-6)
    parts, _ = sgd.step(w, (torch.tensor([3.0, 4.0]), torch.tensor([9.0, 9.0])), State({}), 1.0, ctx)
    torch.testing.assert_close(parts, step - 9, rtol=0, atol=1e-6)


def test_losses_per_sample(golden: Golden, tmp_path: Path) -> None:
    """An injected loss: label smoothing is taken; a loss of another shape is refused in one line."""
    smooth = golden.run(FedAvg(net=golden.net(), loss=nn.CrossEntropyLoss(label_smoothing=0.1)))[1]
    plain = golden.run(FedAvg(net=golden.net()))[1]
    assert (smooth.server[-1].w - plain.server[-1].w).abs().max() > 1e-4

    class Scalar(nn.Module):
        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, y)

    with pytest.raises(UserError, match=r"model.loss = Scalar .*one loss per sample"):
        golden.run(FedAvg(net=golden.net(), loss=Scalar()))


def test_initial_weights(golden: Golden, tmp_path: Path) -> None:
    torch.save(golden.init, tmp_path / "init.pt")
    fresh = type(golden.net())
    for source in (golden.init, str(tmp_path / "init.pt")):
        objective = FedAvg(net=fresh(), init_weights=source)
        assert torch.equal(objective.net.fc1.bias, golden.init["fc1.bias"])
    run, _ = golden.run(FedAvg(net=golden.net()))
    checkpoint = run.folder.path / "checkpoints" / "last.ckpt"
    assert torch.allclose(
        FedAvg(net=fresh().double(), init_weights=str(checkpoint)).net.fc1.bias, run.objective.net.fc1.bias
    )
    with pytest.raises(UserError, match=r"does not fit DigitsMLP: '.*' is missing"):
        FedAvg(net=DigitsMLP(), init_weights=golden.init)
    with pytest.raises(UserError, match="no such file"):
        FedAvg(net=DigitsMLP(), init_weights="nowhere.pt")


def test_a_net_with_running_statistics_is_told(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"buffer '1.running_mean'.*GroupNorm"):
        FedAvg(net=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_constant_buffer_needs_no_policy() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("places", torch.arange(2.0))
    with pytest.raises(UserError, match=r"'places': .*; register a constant with persistent=False$"):
        FedAvg(net=net)
    net.register_buffer("places", torch.arange(2.0), persistent=False)
    assert FedAvg(net=net).net_buffers is None


def test_flatness_monitor_against_the_plain_functions(golden: Golden) -> None:
    from fl_lightning.flatness import hessian, lambda_max, measure_discrepancy

    run, record = golden.run(
        SCAFFOLD(net=golden.net(), ascent=SAM(0.1)), sampler=ReplaySampler([[0, 1, 2, 3]] * 2), max_rounds=2,
        callbacks=[FlatnessMonitor(2, [LambdaMax(samples=None, tol=1e-8), Discrepancy(rho=0.1)])],
    )  # fmt: skip
    net, loss, data = run.objective.net, run.objective.loss, run.data

    def batches(k: int) -> Any:
        return lambda: data.eval_batches(data.clients[k], torch.float64)

    clients = [(record.local[1][k].w, batches(k)) for k in range(4)]
    assert run.metrics["flatness/discrepancy"] == pytest.approx(
        measure_discrepancy(net, loss, clients, rho=0.1), rel=1e-9
    )
    top = lambda_max(hessian(net, loss, lambda: data.eval_batches("train", torch.float64)), tol=1e-8)
    assert run.metrics["flatness/lambda_max"] == pytest.approx(top.value, rel=1e-6)
    assert run.metrics["flatness/lambda_max_residual"] < 1e-8


def test_ten_lines_of_python(tmp_path: Path) -> None:
    """A newcomer would write it so, with lists of per-client arrays."""
    draw = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(3, 5, generator=draw)
    clients = []
    for _ in range(6):
        y = torch.randint(3, (20,), generator=draw)
        clients.append((centers[y] + torch.randn(20, 5, generator=draw), y))
    data = Arrays(client_arrays=clients, test=clients[0], batch_size=10)
    trainer = FederatedTrainer(max_rounds=10, clients_per_round=3, default_root_dir=str(tmp_path), accelerator="cpu")
    run = trainer.fit(FedAvg(net=nn.Linear(5, 3)), data)
    assert trainer.test(run.objective, data)["server/test/acc"] > 0.9


def test_complex_numbers_of_a_net_are_refused() -> None:
    """Torch would leave out their imaginary part."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
    with pytest.raises(
        UserError, match=r"^model\.net = Sequential: freqs is complex, .*; store torch.view_as_real of it$"
    ):
        FedAvg(net)


@pytest.mark.slow
def test_a_run_with_numbers_of_numpy_goes_on(tmp_path: Path) -> None:
    """It does also within no_grad: else a loop over np.arange(5) would leave checkpoints that nothing reads."""

    def trained(rounds: int, ckpt_path: str | None = None) -> Run:
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=np.int32(2), seed=np.uint8(3), threads=1,
            default_root_dir=str(tmp_path), accelerator="cpu",
        )  # fmt: skip
        data = Digits(num_clients=np.int64(4), seed=np.int64(1))
        with torch.no_grad():
            return trainer.fit(FedSAM(DigitsMLP(hidden=8), rho=np.float32(0.1)), data, ckpt_path)

    first = trained(1)
    assert trained(2, str(first.folder.last)).rounds_done == 2
    assert isinstance(load_net(first.folder.path), DigitsMLP)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)).detach()


@pytest.mark.slow
def test_a_run_trains_whatever_the_mode_of_its_caller(tmp_path: Path) -> None:
    settings = {"max_rounds": 1, "clients_per_round": 2, "default_root_dir": str(tmp_path), "callbacks": []}
    torch.manual_seed(0)
    net = DigitsMLP()
    outside = FederatedTrainer(**settings).fit(FedAvg(deepcopy(net)), Digits(num_clients=5)).server.w
    with torch.inference_mode():
        inside = FederatedTrainer(**settings).fit(FedAvg(net), Digits(num_clients=5)).server.w
    assert torch.equal(outside, inside)


def test_nets_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        of_inference = FedAvg(nn.Linear(64, 10))
    with pytest.raises(UserError, match=r"^model\.net = Linear: weight, bias of torch.inference_mode\(\); make it "):
        FederatedTrainer(default_root_dir=str(tmp_path)).fit(of_inference, Digits())
    for engine in ("sequential", "batched"):
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=2, default_root_dir=str(tmp_path), engine=engine, accelerator="cpu"
        )
        with pytest.raises(UserError, match=r"^model\.net: the loss has no gradient with respect to its weights; "):
            trainer.fit(FedAvg(Detached(64, 10)), Digits(num_clients=4))


def test_clients_own_models_are_tested_from_a_checkpoint(tmp_path: Path) -> None:
    """The trained objective has none of them."""
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=3, default_root_dir=str(tmp_path), accelerator="cpu")
    data = Digits(num_clients=4)
    run = trainer.fit(FedAvg(DigitsMLP(hidden=8), parts=[Personal(["*"])]), data)
    with pytest.raises(UserError, match=r'^ckpt_path = None: give the run\'s ckpt_path, such as "last"'):
        trainer.test(run.objective, data)
    assert "server/clients/acc" in trainer.test(run.objective, data, "last")


def test_a_round_broken_off_while_it_is_measured_is_undone(golden: Golden) -> None:
    class Stop(Callback):
        def on_round_end(self, run: Run) -> None:
            if run.rounds_done == 3:
                raise KeyboardInterrupt

    reference = golden.run(SCAFFOLD(net=golden.net()))[1]
    with pytest.raises(KeyboardInterrupt):
        golden.run(SCAFFOLD(net=golden.net()), callbacks=[Stop()])
    saved = max(golden.folder.glob("*/*/checkpoints/last.ckpt"))
    state = torch.load(saved, weights_only=True)
    assert state["round"] == 2
    assert torch.equal(state["server"]["w"], reference.server[2].w)
    assert torch.equal(state["clients"]["rows"]["c"], torch.stack([reference.client[1][k].c for k in (0, 1, 2)]))


@pytest.mark.parametrize("options", [{"relaxed_init": 0.2}, {}], ids=["w_last", "teacher"])
def test_a_resumed_run_keeps_its_initial_model(golden: Golden, options: Any) -> None:
    """Clients first seen after the interruption get slots from the run's w0, not from the new process's net."""
    algorithm = FedAvg if options else FedGMTv2
    reference = golden.run(algorithm(net=golden.net(), **options))[1]

    class Stop(Callback):
        def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
            if ctx.t == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        golden.run(algorithm(net=golden.net(), **options), callbacks=[Stop()])
    saved = max(golden.folder.glob("*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    torch.manual_seed(5)
    restarted = algorithm(net=type(golden.net())(), **options)
    _, resumed = golden.run(restarted, ckpt_path=str(saved))
    assert torch.equal(resumed.server[-1].w, reference.server[-1].w)


def test_a_loss_that_is_not_a_number_is_told(golden: Golden) -> None:
    class Odd(nn.Module):
        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(logits, y, reduction="none")
            return torch.where((y == 0) & (len(y) == 64), torch.nan, loss)  # 64: the test set

    run, _ = golden.run(FedAvg(net=golden.net(), loss=Odd()), sampler=ReplaySampler([[0]]), max_rounds=1)
    assert str(run.metrics["server/test/loss"]) == "nan"


def test_distillation_in_bfloat16_is_taken_in_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(64, 10, generator=draw)
    teacher = z + 0.02 * torch.randn(64, 10, generator=draw)
    exact = kl_to_teacher(z, teacher).mean()
    with torch.autocast("cpu", torch.bfloat16):
        assert kl_to_teacher(z, teacher).mean() == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.filterwarnings("error")
def test_tf32(tf32: bool) -> None:
    """Products and convolutions alike, whatever torch does by itself, and without a warning."""
    trainer = FederatedTrainer(tf32=tf32, accelerator="cpu")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with trainer.environment():
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_nodes_that_nobody_starts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    trainer = FederatedTrainer(num_nodes=3, accelerator="cpu")
    with pytest.raises(UserError, match=r"^trainer\.num_nodes = 3: no other node could join; start this command by "):
        trainer.launch()
