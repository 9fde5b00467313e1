"""Clients that fail: who takes part, what arrives, what stays as it was, and what is said of divergence."""

from __future__ import annotations

import csv
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import (
    EMA,
    SCAFFOLD,
    SGD,
    SWA,
    Callback,
    Checkpoints,
    Corrupt,
    Digits,
    DigitsMLP,
    Faults,
    FedAvg,
    FedDyn,
    FederatedTrainer,
    FedNova,
    FedSMOO,
    LocalObjective,
    NaiveFedGloSS,
    ReplaySampler,
    Stragglers,
    UserError,
    algorithms,
)
from fl_lightning.core import ClientContext, DivergenceError, State, to_radius
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.participation.samplers import CohortSampler, draw
from fl_lightning.trainer.run import Run
from tests.integration.test_identities import DUALS
from tests.problem import Golden
from tests.runs import DIGITS, assert_same, ended, forked, group, kill, last, metrics, newest, run, state

WD = SGD(lr=0.1, weight_decay=1e-3)
EVERYBODY = {"sampler": ReplaySampler([[0, 1, 2, 3]] * 6)}


def made(golden: Golden, name: str, **options: Any) -> LocalObjective:
    return getattr(algorithms, name)(net=golden.net(), **options)  # type: ignore[no-any-return]


def read(folder: Path) -> dict[int, tuple[int, ...]]:
    """Counts of dropped, late and refused by client."""
    if not (folder / "clients.csv").exists():
        return {}
    with (folder / "clients.csv").open(newline="") as file:
        return {
            int(r["client"]): tuple(int(r[c]) for c in ("dropped", "late", "refused")) for r in csv.DictReader(file)
        }


def bad(kind: Any, **options: Any) -> Faults:
    """One of the four clients of the golden problem is corrupted."""
    return Faults(corrupt=Corrupt(share=0.25, kind=kind, **options))


# Who takes part


class Survivors(CohortSampler):
    """The clients of another sampler that answer."""

    def __init__(self, faults: Faults, cohorts: list[list[int]]) -> None:
        self.faults, self.cohorts = faults, cohorts

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        drawn = self.cohorts[t]
        return [*self.faults.attendance(drawn, [3] * len(drawn), t, 0, seed).steps]


class Drifting(CohortSampler):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        return [int(k) for k in self.rng.choice(m, 2, replace=False)]


def test_a_sampler_that_draws_something_else_again_is_refused(golden: Golden, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.sampler = Drifting: gives another cohort of round 0 when .* again"):
        golden.run(FedAvg(golden.net()), sampler=Drifting())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("drawn", [None, 3, "ab", [[0, 1]], [0, 0], [0, 3], np.eye(2), np.array(1)])
def test_what_is_no_cohort_is_refused(drawn: Any) -> None:
    with pytest.raises(
        UserError, match=r"trainer\.sampler = Given: gives .* in round 2; give different ids from 0 to 2"
    ):
        draw(type("Given", (CohortSampler,), {"__call__": lambda *_: drawn})(), 2, 3, 0)


@pytest.mark.parametrize("drawn", [(2, 0), np.array([2, 0]), torch.tensor([2, 0])])
def test_a_cohort_may_be_an_array(drawn: Any) -> None:
    assert draw(type("Given", (CohortSampler,), {"__call__": lambda *_: drawn})(), 2, 3, 0) == [2, 0]


@pytest.mark.sampled(quick=9, slow=2, start=1)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_dropout_is_a_cohort_of_those_that_answer(golden: Golden, name: str) -> None:
    """They agree to the bit: S of every divisor is the number of uploads that arrive."""
    two_phases = getattr(algorithms, name).phases == 2
    faults = Faults(drop_before=0.3) if two_phases else Faults(drop_before=0.15, drop_after=0.15)
    failing_run, failing = golden.run(made(golden, name, averaging=SWA(start=0.3)), faults=faults)
    cohorts = Survivors(faults, golden.schedule)
    smaller_run, smaller = golden.run(made(golden, name, averaging=SWA(start=0.3)), sampler=cohorts)
    assert 0 < sum(map(len, failing.local)) < sum(map(len, golden.schedule))
    for a, b in ((failing.server, smaller.server), (failing.client, smaller.client)):
        for ours, theirs in zip(a, b, strict=True):
            assert ours.keys() == theirs.keys()
    assert_same(failing_run.server, smaller_run.server)
    for k, row in failing_run.clients.rows().items():
        assert_same(row, smaller_run.clients.rows()[k])


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(("algorithm", "slot"), DUALS)
def test_server_slot_stays_the_mean_of_all_clients(golden: Golden, algorithm: Any, slot: str) -> None:
    """It does under dropout before and after training, lateness and refusal at once."""
    slow = Stragglers(deadline=3, sigma=1.0)
    faults = Faults(0.1, 0.15, stragglers=slow, corrupt=Corrupt(share=0.25, each_round=True))
    model = algorithm(net=golden.net(), optimizer=WD)
    run, record = golden.run(model, faults=faults, sampler=ReplaySampler([[0, 1, 2, 3]] * 6), seed=1)
    for server, clients in zip(record.server[1:], record.client, strict=True):
        mean = sum((c[slot] for c in clients.values()), torch.zeros_like(server.w)) / 4
        torch.testing.assert_close(server[slot], mean, rtol=0, atol=1e-12)
    assert float(run.server[slot].norm()) > 1e-3
    assert all(run.state.failures[kind] for kind in ("dropped", "late", "refused"))


def test_perturbation_of_fedsmoo_is_that_of_the_accepted_clients(golden: Golden) -> None:
    """s is the direction of their mean of mu_i - s_hat_i, of length rho, under all faults at once; or it stays."""
    slow, wrong = Stragglers(deadline=3, sigma=1.0), Corrupt(share=0.25, each_round=True)
    faults = Faults(0.1, 0.15, stragglers=slow, corrupt=wrong)
    run, record = golden.run(FedSMOO(golden.net(), optimizer=WD), faults=faults, seed=1, **EVERYBODY)
    for t, results in enumerate(record.local):
        accepted = [r.upload["s"] for k, r in results.items() if k not in wrong.clients(t, 4, 1)]
        expected = to_radius(torch.stack(accepted).mean(0), 0.1) if accepted else record.server[t].s
        torch.testing.assert_close(record.server[t + 1].s, expected, rtol=0, atol=1e-12)
    assert all(run.state.failures[kind] for kind in ("dropped", "late", "refused"))


def test_two_phases(golden: Golden) -> None:
    """Who is lost after the first phase is not in the second, and keeps its state."""
    cohorts: dict[int, list[set[int]]] = {}

    class Watch(Callback):
        def on_local_end(self, run: Run, result: Any) -> None:
            cohorts.setdefault(result.ctx.t, [set(), set()])[result.ctx.phase].add(result.client)

    faults = Faults(drop_after=0.3)
    run, _ = golden.run(NaiveFedGloSS(golden.net()), callbacks=[Watch()], faults=faults, **EVERYBODY)
    lost = 0
    for t, (first, second) in cohorts.items():
        for phase, clients in ((0, first), (1, second)):
            asked = [0, 1, 2, 3] if phase == 0 else sorted(first)
            assert clients == set(faults.attendance(asked, [3] * len(asked), t, phase, 0).steps)
        assert second <= first
        lost += len(first - second)
    assert lost > 0
    assert sum(run.state.failures["dropped"].values()) == 24 - sum(len(second) for _, second in cohorts.values())


def test_stragglers_take_the_steps_until_the_deadline(golden: Golden) -> None:
    """K, k_lr and FedNova's tau are those of the steps done, on the first minibatches; under lost nothing counts."""
    speeds = {k: Stragglers(1, speeds=[0.2, 1.5]).speed(k, 0) for k in range(4)}
    steps = {k: min(3, math.floor(3 * v)) for k, v in speeds.items()}
    assert {0, 3} < set(steps.values()) and len(set(speeds.values())) == 4
    for late in ("partial", "lost"):
        slow = Faults(stragglers=Stragglers(3, late, speeds=[0.2, 1.5]))  # type: ignore[arg-type]
        run, record = golden.run(FedNova(golden.net(), optimizer=WD), faults=slow, max_rounds=2, **EVERYBODY)
        counts = {k: K for k, K in steps.items() if (K if late == "partial" else K == 3)}
        for results in record.local:
            assert {k: r.ctx.K for k, r in results.items()} == counts
            assert all(r.ctx.k_lr == pytest.approx(0.1 * counts[k]) for k, r in results.items())
            assert all(float(r.upload["tau"]) == counts[k] for k, r in results.items())
        assert run.state.failures == {"late": {k: 2 for k, K in steps.items() if K < 3}}
        assert run.metrics["client/late"] == sum(K < 3 for K in steps.values())
    client, K = next((k, K) for k, K in steps.items() if 0 < K < 3)
    _, full = golden.run(FedAvg(golden.net(), optimizer=WD), local_steps=K, max_rounds=1, **EVERYBODY)
    slow = Faults(stragglers=Stragglers(3, speeds=[0.2, 1.5]))
    _, partial = golden.run(FedAvg(golden.net(), optimizer=WD), faults=slow, max_rounds=1, **EVERYBODY)
    assert torch.equal(full.local[0][client].w, partial.local[0][client].w)


def test_speeds_and_draws() -> None:
    """Speeds are log-normal; a client keeps its speed, and a seed its draws."""
    slow = Stragglers(1, sigma=0.7)
    logs = torch.tensor([math.log(slow.speed(k, 3)) for k in range(2000)])
    assert float(logs.median()) == pytest.approx(0, abs=0.06) and float(logs.std()) == pytest.approx(0.7, abs=0.05)
    assert slow.speed(5, 3) == Stragglers(9, sigma=0.7).speed(5, 3) != slow.speed(5, 4)
    faults, clients = Faults(drop_before=0.2, drop_after=0.25), list(range(4000))
    attendance = faults.attendance(clients, [1] * 4000, 7, 0, 3)
    assert attendance.receivers / 4000 == pytest.approx(0.8, abs=0.02)
    assert len(attendance.steps) / 4000 == pytest.approx(0.6, abs=0.025)
    assert sorted([*attendance.steps, *attendance.dropped]) == clients
    assert faults.attendance([7, 5], [1, 1], 7, 0, 3).steps.keys() == {5, 7} & attendance.steps.keys()
    once, often = Corrupt(0.1), Corrupt(0.1, each_round=True)
    assert len(once.clients(0, 50, 1)) == 5 and once.clients(0, 50, 1) == once.clients(9, 50, 1)
    assert len({often.clients(t, 50, 1) for t in range(9)}) > 1


def test_a_trace_of_availability(golden: Golden, tmp_path: Path) -> None:
    """It starts again after its last round; who is not there is counted as dropped, and receives nothing."""
    (tmp_path / "up.json").write_text(json.dumps([[0, 1], [], [2]]))
    faults = Faults(available=str(tmp_path / "up.json"))
    run, record = golden.run(FedAvg(golden.net()), faults=faults, **EVERYBODY)
    assert [[*r] for r in record.local] == [[0, 1], [], [2], [0, 1], [], [2]]
    assert run.state.failures == {"dropped": {0: 4, 1: 4, 2: 4, 3: 6}}
    assert run.metrics["comm/total_bits"] == 6 * 2 * run.objective.flat.d * 64


def test_what_goes_over_the_wire(golden: Golden) -> None:
    """A client that is not there receives nothing; one that is lost or late has received."""
    d = 1220
    for faults, down, up in (
        (Faults(drop_before=0.5), 1, 1),
        (Faults(drop_after=0.5), 0, 1),
        (Faults(stragglers=Stragglers(1.5, "lost", speeds=[0.5, 4])), 0, 1),
    ):
        run, record = golden.run(SCAFFOLD(golden.net()), faults=faults, **EVERYBODY)
        answers = sum(map(len, record.local))
        assert 0 < answers < 24
        received = answers if down else 24
        assert run.metrics["comm/total_bits"] == (2 * received + 2 * up * answers) * d * 64
        assert run.metrics["comm/transmissions"] == pytest.approx((2 * received + 2 * answers) / 4)


# A round in which nobody answers


def test_nobody_answers(golden: Golden) -> None:
    """Server, averages and clients stay; the round counts, is evaluated, and has no loss."""
    for average in (SWA(start=1), EMA(0.5)):
        faults = Faults(available=[[0, 1, 2, 3], [], [], [0, 1, 2, 3], [0, 1], [2]])
        model = FedDyn(golden.net(), optimizer=WD, averaging=average)
        run, record = golden.run(model, faults=faults, eval_every=3, callbacks=[Checkpoints()], **EVERYBODY)
        for t in (1, 2):
            assert_same(record.server[t + 1], record.server[t])
            assert record.client[t].keys() == record.client[0].keys()
            for k, row in record.client[t].items():
                assert_same(row, record.client[0][k])
        assert all(s.finite() for s in record.server) and run.rounds_done == 6
        logged = metrics(run.folder.path)
        assert [t for t, _ in logged["client/train/loss"]] == [1, 4, 5, 6]
        assert [t for t, _ in logged["server/test/acc"]] == [3, 6]
        assert [n for _, n in logged["client/dropped"]] == [0, 4, 4, 0, 2, 3]
    assert not torch.equal(record.evaluated[-1], record.server[-1].w)


@pytest.mark.parametrize(
    "engine", ["batched", *(pytest.param(engine, marks=pytest.mark.slow) for engine in ("auto", "graphed"))]
)
def test_engines(engine: str, golden: Golden) -> None:
    """All give the same, also where a cohort is empty or its clients' K differ."""
    faults = Faults(0.3, 0.2, stragglers=Stragglers(3, sigma=1.0), corrupt=Corrupt(0.25, "noise"))
    options: dict[str, Any] = {"faults": faults, "sampler": ReplaySampler([[0], [0, 1], [1, 2, 3], [0], [2], [0, 3]])}
    one, record = golden.run(FedSMOO(golden.net(), optimizer=WD), **options)
    other, _ = golden.run(FedSMOO(golden.net(), optimizer=WD), **{**options, "engine": engine})
    assert [] in [[*r] for r in record.local]
    for name, value in one.server.items():
        torch.testing.assert_close(other.server[name], value, rtol=0, atol=1e-10)
    assert other.state.failures == one.state.failures


# What arrives


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise"])
def test_corrupted_upload(golden: Golden, kind: Any) -> None:
    """A model is changed about the received one, an update about zero; the client keeps its own state."""
    faults = bad(kind, factor=2.0)
    (wrong,) = faults.corrupt.clients(0, 4, 0)  # type: ignore[union-attr]
    options: dict[str, Any] = {**EVERYBODY, "max_rounds": 1}
    clean = golden.run(SCAFFOLD(golden.net(), optimizer=WD), **options)[1]
    record = golden.run(SCAFFOLD(golden.net(), optimizer=WD), faults=faults, **options)[1]
    for k in range(4):
        assert torch.equal(record.client[0][k].c, clean.client[0][k].c)
    start, local = clean.server[0].w, clean.local[0]
    moved = 4 * (record.server[1].w - clean.server[1].w)  # by what the one upload differs
    delta = local[wrong].w - start
    moved_c, delta_c = 4 * (record.server[1].c - clean.server[1].c), local[wrong].upload["delta_c"]
    if kind == "noise":
        for noise, size in ((moved, delta), (moved_c, delta_c)):
            assert float(noise.norm() / size.norm()) == pytest.approx(2.0, rel=0.1)
            assert abs(float(noise @ size / noise.norm() / size.norm())) < 0.1
    else:
        factor = -3.0 if kind == "sign_flip" else 1.0
        torch.testing.assert_close(moved, factor * delta, rtol=0, atol=1e-12)
        torch.testing.assert_close(moved_c, factor * delta_c, rtol=0, atol=1e-12)


def test_a_refused_client(golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in no average and not in the loss, is named once, and counted; its row stays."""
    faults = bad("nan")
    (wrong,) = faults.corrupt.clients(0, 4, 0)  # type: ignore[union-attr]
    run, record = golden.run(SCAFFOLD(golden.net(), optimizer=WD), faults=faults, **EVERYBODY)
    others = [k for k in range(4) if k != wrong]
    _, without = golden.run(SCAFFOLD(golden.net(), optimizer=WD), sampler=ReplaySampler([others] * 6))
    assert torch.equal(record.server[-1].w, without.server[-1].w)
    assert wrong not in record.client[-1]
    losses = [record.local[-1][k].loss for k in others]
    assert run.metrics["client/train/loss"] == pytest.approx(float(torch.stack(losses).mean()))
    assert read(run.folder.path) == {wrong: (0, 0, 6)}
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert said == [f"round 1: not finite and left out: client {wrong} (each is named once; counts are in clients.csv)"]


class Uneven(SCAFFOLD):
    """The second upload is a single number, which a sum would add to every weight."""

    uploads = 0

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Any:
        upload, client = super().local_end(w, client, received, ctx)
        self.uploads += 1
        return {**upload, "delta_c": upload["delta_c"][: 1 if self.uploads == 2 else None]}, client


def test_upload_of_another_shape_is_one_line(golden: Golden) -> None:
    line = r"^model = Uneven: client 1 uploads shapes .*'delta_c': \[1\].*, the first client .*'delta_c': \[1220\]"
    with pytest.raises(UserError, match=line):
        golden.run(Uneven(golden.net(), optimizer=WD), **EVERYBODY)


# Divergence


class Explodes(SCAFFOLD):
    """From round 3 on, counted from 1, every upload has a number that is not finite."""

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Any:
        upload, client = super().local_end(w, client, received, ctx)
        if ctx.t == 2:
            upload["delta_c"] = upload["delta_c"].clone()
            upload["delta_c"][-1] = math.inf
        return upload, client


def test_divergence_is_explained(golden: Golden) -> None:
    """The message has round, clients, entry, parameter, and the norms that led there."""
    says = (
        r"round 3: every upload is not finite \(client 0: delta_c, first in fc2.bias; client 1: delta_c, .*; "
        r"client 2: .*; \.\.\.\), training has diverged; in the last rounds: .*‖c‖ [\d.e-]+ → [\d.e-]+.*; lower model"
    )
    with pytest.raises(DivergenceError, match=says):
        golden.run(Explodes(golden.net()), **EVERYBODY)
    assert last(newest(golden.folder))["round"] == 2
    with pytest.raises(DivergenceError, match=r"round \d: the new global state is not finite \(w, first in fc2.bias\)"):
        golden.run(FedAvg(golden.net(), optimizer=SGD(lr=0.1)), faults=bad("scale", factor=1e308), **EVERYBODY)


def test_run_goes_on_after_divergence(golden: Golden) -> None:
    run, record = golden.run(Explodes(golden.net()), on_divergence="continue", **EVERYBODY)
    assert_same(record.server[3], record.server[2])
    logged = metrics(run.folder.path)
    assert [n for _, n in logged["client/diverged"]] == [0, 0, 1, 1, 1, 1]
    assert [n for _, n in logged["client/refused"]] == [0, 0, 4, 0, 0, 0]
    assert [t for t, _ in logged["client/train/loss"]] == [1, 2, 4, 5, 6]
    assert "client/diverged" not in metrics(golden.run(FedAvg(golden.net()))[0].folder.path)


def test_exit_code_of_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("fit", "--model.optimizer.lr=1e200", root=tmp_path)
    assert end.value.code == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: round 1: ") and "net" not in line.split(";")[0]


# On the way


ARGS = [
    "--trainer.max_rounds=5",
    "--trainer.on_divergence=continue",
    "--trainer.faults=Faults",
    "--trainer.faults.drop_before=0.1",
    "--trainer.faults.drop_after=0.2",
    "--trainer.faults.stragglers=Stragglers",
    "--trainer.faults.stragglers.deadline=5",
    "--trainer.faults.corrupt=Corrupt",
    "--trainer.faults.corrupt.share=0.2",
    "--trainer.callbacks+={class_path: Checkpoints, init_args: {every_n_rounds: 2}}",
]


class Interrupt(Callback):
    """Breaks off in the middle of round 4."""

    def on_local_end(self, run: Run, result: Any) -> None:
        if result.ctx.t == 3:
            raise KeyboardInterrupt


def digits(root: Path, *callbacks: Callback, seed: int = 0, **options: Any) -> FederatedTrainer:
    slow, wrong = Stragglers(5), Corrupt(0.2, each_round=True)
    settings = {"clients_per_round": 4, "max_rounds": 5, "engine": "sequential", "name": f"seed_{seed}", **options}
    return FederatedTrainer(
        **settings, seed=seed, faults=Faults(0.1, 0.2, stragglers=slow, corrupt=wrong), callbacks=list(callbacks),
        accelerator="cpu", enable_progress_bar=False, default_root_dir=str(root),
    )  # fmt: skip


def objective() -> LocalObjective:
    torch.manual_seed(0)
    return FedDyn(DigitsMLP(hidden=8))


def data() -> Digits:
    return Digits(num_clients=6, batch_size=32)


@pytest.mark.slow
def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    reference = digits(tmp_path / "whole").fit(objective(), data()).folder.path
    with pytest.raises(KeyboardInterrupt):
        digits(tmp_path / "broken", Interrupt()).fit(objective(), data())
    broken = digits(tmp_path / "broken").fit(objective(), data(), "last").folder.path
    assert_same(state(broken), state(reference))
    assert metrics(broken) == metrics(reference)
    assert read(broken) == read(reference) != {}


@pytest.mark.slow
def test_parallel_runs(tmp_path: Path) -> None:
    """Each is what it would be alone, though clients of the one or the other are missing."""
    together = [digits(tmp_path / "a", seed=s, engine="batched", precision="64-true") for s in (0, 1)]
    alone = [digits(tmp_path / "b", seed=s, engine="batched", precision="64-true") for s in (0, 1)]
    parallel_runs.fit(together, [objective(), objective()], data())
    for a, b in zip(together, alone, strict=True):
        b.fit(objective(), data())
        torch.testing.assert_close(a.run.server.w, b.run.server.w, rtol=0, atol=1e-10)
        assert a.run.state.failures == b.run.state.failures != {}


@pytest.mark.slow
def test_kill_9(tmp_path: Path) -> None:
    reference = run("fit", *ARGS, "--trainer.max_rounds=60", root=tmp_path / "whole", model="SCAFFOLD")
    args = ["fit", "--model=SCAFFOLD", *DIGITS, *ARGS, "--trainer.max_rounds=60"]
    args.append(f"--trainer.default_root_dir={tmp_path / 'broken'}")
    with forked(*args, cwd=tmp_path) as child:
        while not [*tmp_path.glob("broken/*/*/checkpoints/last.ckpt")]:
            assert child.poll() is None
            time.sleep(0.01)
        kill(child)
        assert child.wait() == -signal.SIGKILL
    broken = newest(tmp_path / "broken")
    assert 0 < last(broken)["round"] < 60
    run("fit", *ARGS, "--trainer.max_rounds=60", "--ckpt_path=last", root=tmp_path / "broken", model="SCAFFOLD")
    assert_same(state(broken), state(reference))
    assert (broken / "clients.csv").read_text() == (reference / "clients.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_two_processes(deterministic: bool, tmp_path: Path) -> None:
    """They agree also where a process, or the cohort, has no client."""
    args = [*ARGS, "--trainer.sampler=ReplaySampler", "--trainer.sampler.rounds=[[0,1,2],[3],[0],[4,5],[2]]"]
    args += ["--trainer.faults.available=[[0,1,2,3,4,5],[0]]", f"--trainer.deterministic={deterministic}"]
    one = run("fit", *args, root=tmp_path / "one", model="SCAFFOLD")
    ddp = [*args, "--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    with group(2, "fit", "--model=SCAFFOLD", *DIGITS, *ddp, cwd=tmp_path) as children:
        ended(children)
    two = newest(tmp_path / "two")
    assert read(two) == read(one) != {}
    if deterministic:
        assert_same(state(two), state(one))
    for name, value in state(one).items():
        torch.testing.assert_close(state(two)[name], value, rtol=0, atol=1e-5)


@pytest.mark.sampled(slow=6)
@pytest.mark.slow
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_ends(name: str, tmp_path: Path) -> None:
    """30 % dropout, 10 % stragglers, 5 % uploads of NaN, under the mean; everything stays finite."""
    slow = Stragglers(deadline=5, sigma=0.37)  # K = 3 of 90 samples; log 0.62 is 1.28 deviations below the median
    faults = Faults(drop_after=0.3, stragglers=slow, corrupt=Corrupt(0.05, each_round=True))
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=6, clients_per_round=10, faults=faults, accelerator="cpu", threads=1, engine="sequential",
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    run = trainer.fit(getattr(algorithms, name)(DigitsMLP(hidden=8)), Digits(num_clients=40, batch_size=8))
    assert run.rounds_done == 6 and run.server.finite()
    assert all(row.finite() for row in run.clients.rows().values())
    assert {"dropped", "late"} <= run.state.failures.keys()


# What is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Faults(drop_before=1.0), "trainer.faults.drop_before = 1.0: give a finite number from 0 to below 1"),
        (lambda: Faults(drop_after=math.nan), "trainer.faults.drop_after = nan"),
        (lambda: Faults(available=[]), "trainer.faults.available = .*at least one round"),
        (lambda: Faults(available="/dev/zero"), "trainer.faults.available = /dev/zero: no such file"),
        (lambda: Faults(available="none.json"), "trainer.faults.available = none.json: no such file"),
        (lambda: Stragglers(0), "trainer.faults.stragglers.deadline = 0"),
        (lambda: Stragglers(3, "never"), "trainer.faults.stragglers.late = never: give one of partial, lost"),  # type: ignore[arg-type]
        (lambda: Stragglers(3, sigma=-1), "trainer.faults.stragglers.sigma = -1"),
        (lambda: Stragglers(3, speeds=[2, 1]), "trainer.faults.stragglers.speeds"),
        (lambda: Corrupt(0), "trainer.faults.corrupt.share = 0"),
        (lambda: Corrupt(0.1, "evil"), "trainer.faults.corrupt.kind = evil: give one of nan"),  # type: ignore[arg-type]
        (lambda: Corrupt(0.1, "scale"), "trainer.faults.corrupt.factor = 1.0: with kind scale"),
        (lambda: Corrupt(0.1, factor=math.inf), "trainer.faults.corrupt.factor = inf"),
        (lambda: FederatedTrainer(on_divergence="retry"), "trainer.on_divergence = retry: give one of stop, continue"),
    ],
)
def test_settings_out_of_range(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


def test_refused_before_anything_is_written(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"trainer.faults.available\[1\] = \[4\]: give different ids from 0 to 3"):
        golden.run(FedAvg(golden.net()), faults=Faults(available=[[0], [4]]))
    trainer = FederatedTrainer(faults=Faults(drop_after=0.1), accelerator="cpu", default_root_dir=str(golden.folder))
    with pytest.raises(UserError, match=r"trainer.faults: centralized training has no clients that fail"):
        trainer.centralized(FedAvg(DigitsMLP()), Digits())
    assert not [*golden.folder.iterdir()]
