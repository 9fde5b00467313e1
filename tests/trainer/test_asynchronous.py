"""Asynchronous servers: own transcription, identities to the bit, refusals, and runs that were killed."""

from __future__ import annotations

import csv
import heapq
import math
import re
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import (
    MOON,
    SGD,
    Arrays,
    Asynchronous,
    Callback,
    Clock,
    Compress,
    CoordinateMedian,
    Corrupt,
    Ditto,
    Faults,
    FedACG,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FederatedTrainer,
    FedSAM,
    GaussianPrivacy,
    Krum,
    Personal,
    ReplaySampler,
    SemiSynchronous,
    UniformSampler,
    UserError,
    algorithms,
)
from fl_lightning.core import DivergenceError, files
from fl_lightning.engine import contract_of
from fl_lightning.trainer.run import Run
from tests.integration.test_processes import launch
from tests.runs import DIGITS, assert_same, killed, metrics, state
from tests.runs import run as fit

DURATIONS = 1, 1.7, 0.6, 3.1
COHORTS = [[0, 1], [1, 2], [0, 2], [1, 3], [2, 3], [0, 3]]
N = 6


def data(sizes: tuple[int, ...] = (N,) * 4, batch_size: int | None = None) -> Arrays:
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 2)) for n in (*sizes, 5)]
    y = [rng.integers(0, 3, size=len(inputs)) for inputs in x]
    return Arrays(client_arrays=list(zip(x, y, strict=True))[:-1], test=(x[-1], y[-1]), batch_size=batch_size)


def train(
    folder: Path, rule: Any, kind: Any = FedAvg, durations: Any = DURATIONS, rounds: int = 8, **options: Any
) -> Run:
    """Four clients whose tasks take this long: of N samples for SGD, three times the forward passes."""
    torch.manual_seed(0)
    ckpt_path = options.pop("ckpt_path", None)
    settings = {key: options.pop(key) for key in ("parts", "server_update", "optimizer", "buffers") if key in options}
    batch_size, steps = options.pop("batch_size", None), options.get("local_steps", 1)
    net = options.pop("net", nn.Linear(2, 3)).double()
    samples = N if batch_size is None else batch_size * steps
    model = kind(net, **({"optimizer": SGD(lr=0.5)} | settings))
    forward, backward = contract_of(model)[0].passes
    rows = [f"{k},{d / (samples * (forward + 2 * backward))!r},1e30,1e30,0" for k, d in enumerate(durations)]
    (folder / "devices.csv").write_text("\n".join(["device,sec_per_sample,down_mbps,up_mbps,latency_s", *rows]))
    defaults: dict[str, Any] = {"max_rounds": rounds, "engine": "sequential", "precision": "64-true", "local_steps": 1}
    defaults |= {"sampler": ReplaySampler(COHORTS * 40)}
    trainer = FederatedTrainer(
        accelerator="cpu", threads=1, enable_progress_bar=False, default_root_dir=str(folder), asynchronous=rule,
        clock=Clock(str(folder / "devices.csv")),
        **defaults | options,
    )  # fmt: skip
    return trainer.fit(model, data(batch_size=batch_size), ckpt_path)


def events(run: Run) -> list[dict[str, str]]:
    with (run.folder.path / "events.csv").open() as file:
        return list(csv.DictReader(file))


def column(run: Run, name: str) -> list[float]:
    return [value for _, value in metrics(run.folder.path)[name]]


def transcription(
    w: torch.Tensor, K: int, C: int, steps: int, weight: Any, mixes: bool, rows: dict[int, Any] | None = None
) -> tuple[Any, Any, Any]:
    """An event loop of its own: softmax regression, one step on all samples, lr 0.5; the mean of K uploads.

    With ``rows``, which get each client's biases and residual, the biases stay, and the top 2 of 6 changes are sent.
    """
    arrays, cohorts = data().client_arrays or [], (k for cohort in cycle(COHORTS) for k in cohort)

    def trained(w: torch.Tensor, k: int) -> torch.Tensor:
        x, y = (torch.as_tensor(v) for v in arrays[k])
        W, b = w[:6].view(3, 2), w[6:]
        p = torch.softmax(x.double() @ W.T + b, 1) - nn.functional.one_hot(y.long(), 3)
        return w - 0.5 * torch.cat([(p.T @ x.double() / len(x)).flatten(), p.mean(0)])

    def uploaded(sent: torch.Tensor, k: int) -> torch.Tensor:
        if rows is None:
            return trained(sent, k)
        biases, residual = rows.get(k, (sent[6:], 0.0))
        x = trained(torch.cat([sent[:6], biases]), k)
        change = x[:6] - sent[:6] + residual
        top = torch.where(change.abs() >= change.abs().sort().values[-2], change, 0.0)
        rows[k] = x[6:], change - top
        return torch.cat([sent[:6] + top, sent[6:]])

    time, version, number, queue, buffer, times, stale = 0.0, 0, 0, [], [], [], []  # type: ignore[var-annotated]
    while version < steps:
        while queue and queue[0][0] <= time and version < steps:
            _, _, k, sent, base = heapq.heappop(queue)
            buffer.append((uploaded(sent, k), sent, version - base))
            if len(buffer) == K:
                w = w + sum(weight(s) * (x - (w if mixes else sent)) for x, sent, s in buffer) / K
                times.append(time)
                stale.append(sum(s for *_, s in buffer) / K)
                version, buffer = version + 1, []
        while len(queue) < C:
            if (k := next(cohorts)) not in [task[2] for task in queue]:
                heapq.heappush(queue, (time + DURATIONS[k], number, k, w, version))
                number += 1
        time = queue[0][0]
    return w, times, stale


@pytest.mark.parametrize(
    ("rule", "K", "C", "weight"),
    [
        (FedBuff(2, 2), 2, 2, lambda s: (1 + s) ** -0.5),
        (FedBuff(3, 4, exponent=1), 3, 4, lambda s: 1 / (1 + s)),
        (FedBuff(1, 3, exponent=0), 1, 3, lambda s: 1.0),
        (FedAsync(concurrency=3), 1, 3, lambda s: 0.6 / math.sqrt(1 + s)),
        (FedAsync(0.9, "hinge", grace=1, concurrency=4), 1, 4, lambda s: 0.9 / (10 * max(s - 1, 0) + 1)),
        (FedAsync(0.5, "constant", concurrency=4), 1, 4, lambda s: 0.5),
    ],
)
def test_transcription(rule: Any, K: int, C: int, weight: Any, tmp_path: Path) -> None:
    run = train(tmp_path, rule, rounds=16)
    w, times, stale = transcription(run.clients.w0, K, C, 16, weight, isinstance(rule, FedAsync))
    assert run.server.w.sub(w).abs().max() < 1e-10 < run.server.w.sub(run.clients.w0).abs().max()
    assert column(run, "clock/time_s") == pytest.approx(times, rel=1e-12)
    assert column(run, "client/staleness") == stale and max(stale) > 0
    assert [rule.weight(s) for s in range(8)] == pytest.approx([weight(s) for s in range(8)], rel=1e-15)


@pytest.mark.parametrize("rule", [FedBuff(2, 3, exponent=1), FedAsync(1, decay=1, concurrency=3)])
def test_transcription_with_own_parameters_and_codes(rule: Any, tmp_path: Path) -> None:
    """Clients that train from old models keep their rows; a step has no other weights."""
    run = train(tmp_path, rule, rounds=16, parts=[Personal(["bias"]), Compress(rate=1 / 3)])
    w0, rows = run.clients.w0, dict[int, Any]()
    w, *_ = transcription(w0, rule.buffer or 0, 3, 16, lambda s: 1 / (1 + s), isinstance(rule, FedAsync), rows)
    assert run.server.w.sub(w).abs().max() < 1e-10 < run.server.w.sub(w0).abs().max()
    assert run.clients.rows().keys() == rows.keys()
    for k, row in run.clients.rows().items():
        torch.testing.assert_close((row.own, row["Compress.w"]), rows[k], rtol=0, atol=1e-10)


def test_times_by_hand(tmp_path: Path) -> None:
    """0 arrives at 1, where 1 still trains and 2 starts; 2 arrives at 1.6; then 1 at 1.7, and 2 again at 2.3."""
    run = train(tmp_path, FedBuff(2, 2))
    assert column(run, "clock/time_s") == pytest.approx([1.6, 2.3, 4.0, 5.6, 6.6, 7.4, 8.2, 10.3])
    log = [(row["event"], row["client"], float(row["time_s"])) for row in events(run)[:8]]
    assert log == [
        ("start", "0", 0), ("start", "1", 0), ("arrival", "0", 1), ("start", "2", 1), ("arrival", "2", 1.6),
        ("step", "", 1.6), ("start", "0", 1.6), ("arrival", "1", 1.7),
    ]  # fmt: skip
    assert {**events(run)[7], "time_s": ""} == {
        "step": "2", "time_s": "", "event": "arrival", "client": "1", "version": "0", "staleness": "1"
    }  # fmt: skip
    landed = Counter(row["client"] for row in events(run) if row["event"] == "arrival")
    tenths = [f"clock/uploads_{tenth}" for tenth in (3, 5, 8, 10)]  # of four clients
    assert [run.metrics[name] for name in tenths] == [landed[k] for k in "2013"]
    down, up = run.contract[0].bits
    starts, arrivals = (sum(row["event"] == kind for row in events(run)) for kind in ("start", "arrival"))
    assert run.state.total_bits == starts * down + arrivals * up and arrivals == 16
    assert {*run.state.training["sent"]} == {int(task[3]) for task in run.state.training["tasks"]}


MINI: dict[str, Any] = {"batch_size": 2, "local_steps": 3, "sampler": UniformSampler(2), "durations": (2.0,) * 4}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedAvg, {"optimizer": SGD(lr=0.5, momentum=0.9, lr_decay=0.9)}),
        (FedAvg, {"engine": "graphed"}),
        (FedAdam, {}),
        (FedACG, {}),
        (MOON, {}),
        (FedSAM, {"aggregation": CoordinateMedian()}),
        (FedAvg, {"parts": [Personal(["bias"])]}),
        (FedAvg, {"parts": [Ditto()], "durations": (4.0,) * 4}),
        (FedAvg, {"parts": [Compress("randk", 0.5)]}),
        (FedAvg, {"faults": Faults(drop_before=0.2)}),
    ],
)
def test_equal_speeds_and_a_full_buffer_are_rounds(kind: Any, options: Any, tmp_path: Path) -> None:
    """They are to the bit, draws of minibatches included; so are those of the semi-synchronous server."""
    rounds = train(tmp_path, None, kind, **MINI | options)
    rules = [FedBuff(2, 2), SemiSynchronous(MINI["durations"][0])]
    if "faults" in options or "durations" in options:  # a slot that is free is taken by another one at once
        rules = rules[:1] if "faults" not in options else []
    for rule in rules:
        run = train(tmp_path, rule, kind, **MINI | options)
        assert all(torch.equal(rounds.server[name], run.server[name]) for name in rounds.server)
        assert rounds.clients.rows().keys() == run.clients.rows().keys()
        for k, row in rounds.clients.rows().items():
            assert all(torch.equal(row[name], run.clients.rows()[k][name]) for name in row)
        assert column(run, "clock/time_s") == column(rounds, "clock/time_s")
        assert column(run, "client/train/loss") == column(rounds, "client/train/loss")


def test_rules_see_the_buffer(tmp_path: Path) -> None:
    """They see neither the cohorts that are drawn nor those of over-selection."""
    assert train(tmp_path, FedBuff(5, 3), aggregation=Krum(0.1), sampler=UniformSampler(1)).rounds_done == 8
    clock = Clock(sec_per_sample=1, over_selection=2)
    trainer = FederatedTrainer(clients_per_round=2, aggregation=Krum(0.1), clock=clock, accelerator="cpu")
    with pytest.raises(UserError, match="and this one has 2, with f = 1"):
        trainer.start(FedAvg(nn.Linear(2, 3)), data())


def test_one_at_a_time(tmp_path: Path) -> None:
    """FedBuff with a buffer of one, FedAsync with alpha 1, and cohorts of one are the same, whatever the speeds."""
    options = MINI | {"sampler": UniformSampler(1), "durations": DURATIONS}
    rounds = train(tmp_path, None, **options)
    for rule in (FedBuff(1, 1), FedAsync(1.0, concurrency=1), FedBuff(1, 1, exponent=3)):
        run = train(tmp_path, rule, **options)
        assert torch.equal(run.server.w, rounds.server.w)
        assert column(run, "clock/time_s") == pytest.approx(column(rounds, "clock/time_s"))


def test_doubled_durations_and_no_weight(tmp_path: Path) -> None:
    once, twice = (train(tmp_path, FedBuff(2, 3), durations=[x * d for d in DURATIONS]) for x in (1, 2))
    assert torch.equal(once.server.w, twice.server.w)
    assert column(twice, "clock/time_s") == [2 * t for t in column(once, "clock/time_s")]
    still = train(tmp_path, FedAsync(0.0, concurrency=3))
    assert torch.equal(still.server.w, still.clients.w0)


@pytest.mark.slow
def test_steps_by_time(tmp_path: Path) -> None:
    """A step is at the first multiple of the period after an arrival, with all that has arrived until then."""
    run = train(tmp_path, SemiSynchronous(0.75, 2), rounds=4)
    assert column(run, "clock/time_s") == [1.5, 2.25, 3.0, 4.5]
    landed = [(row["client"], round(float(row["time_s"]), 9)) for row in events(run) if row["event"] == "arrival"]
    assert landed == [("0", 1), ("2", 1.6), ("1", 1.7), ("2", 2.3), ("0", 2.6), ("1", 4)]
    often = train(tmp_path, SemiSynchronous(1e-9, 2), rounds=4)
    assert column(often, "clock/time_s") == pytest.approx([1, 1.6, 1.7, 2.3])
    # an arrival at 4.9 lies on the seventh tick, though 4.9 / 0.7 is just above 7
    on_tick = train(tmp_path, SemiSynchronous(0.7, 2), rounds=1, durations=[4.9 * d for d in DURATIONS])
    assert column(on_tick, "clock/time_s") == pytest.approx([4.9])
    with pytest.raises(
        UserError, match=r"^trainer\.asynchronous\.period_s = 1e\+12: more than 10,000 uploads .* fewer"
    ):
        train(tmp_path, SemiSynchronous(1e12, 2), rounds=1, sampler=UniformSampler(2))
    with pytest.raises(UserError, match=r"^trainer\.asynchronous: give either buffer or period_s"):
        Asynchronous(None, None, None, None)


def test_staleness_in_waves(tmp_path: Path) -> None:
    """C clients that start together and are done together have staleness 0, 1, ..., C - 1."""
    run = train(tmp_path, FedAsync(concurrency=3), durations=(1.0,) * 4, sampler=UniformSampler(3), rounds=9)
    assert column(run, "client/staleness") == [0, 1, 2] * 3
    assert column(run, "clock/time_s") == [1] * 3 + [2] * 3 + [3] * 3
    strict = train(tmp_path, FedAsync(concurrency=3, max_staleness=1), durations=(1.0,) * 4, sampler=UniformSampler(3))
    assert column(strict, "client/staleness") == [0, 1] * 4
    assert sum(row["event"] == "late" for row in events(strict)) == sum(strict.state.failures["late"].values()) == 3


def test_buffers_of_old_models_are_mixed(tmp_path: Path) -> None:
    """Added as updates, variances would fall below 0; without a weight the server has those of the last upload."""

    class Buffers(Callback):
        def on_local_end(self, run: Run, result: Any) -> None:
            self.last = result.upload["buffers"]

        def on_round_end(self, run: Run) -> None:
            torch.testing.assert_close(run.server.buffers, self.last)  # of the mean of one, up to rounding

    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    run = train(tmp_path, FedBuff(1, 3, exponent=0), net=net, buffers="average", callbacks=[Buffers()], local_steps=5)
    assert max(column(run, "client/staleness")) > 0


def test_lost_uploads(tmp_path: Path) -> None:
    """Who is dropped frees its slot, and leaves its state as it was."""
    run = train(tmp_path, FedBuff(2, 2), MOON, faults=Faults(0.2, 0.3), rounds=12)
    log = events(run)
    lost = [row for row in log if row["event"] in ("lost", "absent")]
    assert {row["event"] for row in lost} == {"lost", "absent"}
    assert sum(run.state.failures["dropped"].values()) == len(lost)
    with pytest.raises(UserError, match=r"^trainer\.asynchronous: nobody can start in 1000 cohorts of UniformSampler"):
        train(tmp_path, FedBuff(2, 2), faults=Faults(available=[[]]), sampler=UniformSampler(2))


def test_uploads_that_are_not_finite(tmp_path: Path) -> None:
    """One broken client ends no run; as many such uploads in a row as clients train at once do."""
    broken, rule = Faults(corrupt=Corrupt(0.25)), FedAsync(concurrency=3)
    (bad,) = broken.corrupt.clients(0, 4, 0) if broken.corrupt else ()
    run = train(tmp_path, rule, MOON, faults=broken, rounds=12)
    landed = [int(row["client"]) == bad for row in events(run) if row["event"] == "arrival"]
    assert column(run, "client/refused") == landed and 0 < sum(landed) < 12
    assert bad not in run.clients.rows() and run.state.failures["refused"] == {bad: sum(landed)}
    half = train(tmp_path, rule, MOON, faults=broken, rounds=landed.index(True) + 1)
    last = str(half.folder.last)
    assert half.state.training["refused"] == 1
    assert torch.equal(train(tmp_path, rule, MOON, faults=broken, rounds=12, ckpt_path=last).server.w, run.server.w)
    everyone = Faults(corrupt=Corrupt(1.0))
    with pytest.raises(DivergenceError, match=r"^round 3: every upload is not finite"):
        train(tmp_path, rule, faults=everyone)
    assert column(train(tmp_path, rule, faults=everyone, on_divergence="continue"), "client/diverged")[-1] == 6


def test_a_client_twice_in_a_step(tmp_path: Path) -> None:
    """If its second upload is refused, it keeps the state of its first, that of training before the round, too."""

    class Second(Corrupt):
        def clients(self, t: int, m: int, seed: int) -> frozenset[int]:
            return frozenset({2}) if t == 2 else frozenset()

    cohorts = ReplaySampler([[2, 0], [2, 1], [2, 3]] * 40)
    options: dict[str, Any] = {"durations": (5.0, 5.0, 0.6, 5.0), "sampler": cohorts, "rounds": 1, "parts": [Ditto()]}
    run = train(tmp_path, FedBuff(3, 3), faults=Faults(corrupt=Second(0.25)), **options)
    first = train(tmp_path, FedBuff(2, 3), **options | {"sampler": ReplaySampler([[2, 0], [1, 3]] * 40)})
    landed = [row["client"] for row in events(run) if row["event"] == "arrival"]
    assert landed == ["2", "2", "0"] and run.state.failures["refused"] == {2: 1}
    assert torch.equal(run.clients.rows()[2].own, first.clients.rows()[2].own)


def test_which_algorithms_need_rounds() -> None:
    """docs/clock.md lists those that do not."""
    reasons = {name: getattr(algorithms, name)(nn.Linear(2, 3)).needs_rounds for name in algorithms.__all__}
    assert reasons["NaiveFedGloSS"] == "its 2 phases need the same clients at one model"
    assert reasons["FedSMOO"] == "its duals belong to one model that all clients start from"
    assert reasons["FedCM"] == "its clients receive delta, which the server makes of the clients of a round"
    assert reasons["FedNova"] == "its server needs update, tau of clients that started from one model"
    assert algorithms.FedLESAM(nn.Linear(2, 3), ref="previous_round").needs_rounds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": algorithms.FedGMT}, "trainer.asynchronous = FedBuff: FedGMT needs rounds, its duals belong to one"),
        ({"privacy": GaussianPrivacy(1, 1)}, "trainer.asynchronous = FedBuff: trainer.privacy counts on cohorts"),
        (
            {"aggregation": Krum(0.1), "sampler": UniformSampler(4)},
            "trainer.aggregation.share = 0.1: Krum needs cohorts",
        ),
        ({"sampler": UniformSampler(1, held_out=3)}, "trainer.asynchronous.concurrency = 2: only 1 of the clie"),
        ({"sampler": ReplaySampler(COHORTS), "rounds": 6}, "trainer.sampler.rounds holds 6 rounds, and cohort 7 is"),
    ],
)
def test_refused(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        train(tmp_path, FedBuff(2, 2), **options)


def test_a_weight_of_ones_own_is_a_number(tmp_path: Path) -> None:
    class Mine(FedBuff):
        value: Any = None

        def weight(self, staleness: int) -> float:
            return self.value  # type: ignore[no-any-return]

    for Mine.value in (None, "1", math.nan):
        message = f"trainer.asynchronous = Mine: weight(0) returns {Mine.value!r}; return a finite number"
        with pytest.raises(UserError, match="^" + re.escape(message)):
            train(tmp_path, Mine(2, 2))


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (None, "trainer.asynchronous = FedAsync: trainer.clock is null, and nobody knows when a client is done"),
        (Clock(sec_per_sample=1, deadline_s=1), "trainer.asynchronous = FedAsync: nobody is late for a round"),
        (Clock(sec_per_sample=1, server_s=1), "trainer.asynchronous = FedAsync: the server's steps take no time"),
    ],
)
def test_needs_a_clock(clock: Any, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        FederatedTrainer(asynchronous=FedAsync(), clock=clock, accelerator="cpu")


ARGS = [
    "--trainer.clock=Clock", "--trainer.clock.sec_per_sample=0.01", "--trainer.clock.sigma=1",
    "--trainer.asynchronous=FedBuff", "--trainer.asynchronous.buffer=2", "--trainer.asynchronous.concurrency=4",
    "--trainer.faults=Faults", "--trainer.faults.drop_after=0.1",
]  # fmt: skip


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """Clients in flight train from the versions that they have received."""
    options = MINI | {"durations": DURATIONS, "engine": "sequential"}
    reference, half = (train(tmp_path, FedBuff(2, 3), MOON, rounds=n, **options) for n in (12, 5))
    assert len(half.state.training["sent"]) > 1
    resumed = train(tmp_path, FedBuff(2, 3), MOON, rounds=12, ckpt_path=str(half.folder.last), **options)
    assert resumed.folder.path == half.folder.path
    assert_same(state(resumed.folder.path), state(reference.folder.path))
    assert metrics(resumed.folder.path) == metrics(reference.folder.path)
    assert (resumed.folder.path / "events.csv").read_bytes() == (reference.folder.path / "events.csv").read_bytes()
    with pytest.raises(UserError, match=r"made with trainer.asynchronous = FedBuff, this run has None"):
        train(tmp_path, None, MOON, rounds=12, ckpt_path=str(half.folder.last), **options)
    content = files.load(half.folder.last)
    damages: list[dict[str, Any]] = [{"sent": {}}, {"tasks": [(1.0, 2)]}, {"waiting": "x"}, {"waiting": [4]}]
    (end, number, client, version, *rest), *others = content["training"]["tasks"]
    later = {**content["training"]["sent"], 99: content["training"]["sent"][version]}
    damages.append({"tasks": [(end, number, client, 99, *rest), *others], "sent": later})
    for wrong in damages:
        path = half.folder.checkpoints / "wrong.ckpt"
        files.save(path, {**content, "training": {**content["training"], **wrong}})
        with pytest.raises(UserError, match="its training does not fit this run"):
            train(tmp_path, FedBuff(2, 3), MOON, rounds=12, ckpt_path=str(path), **options)


def test_events_that_are_gone(tmp_path: Path) -> None:
    """A resumed run says that they are, and goes on with an empty file."""
    last = str(train(tmp_path, FedBuff(2, 3), rounds=3).folder.last)
    log = Path(last).parents[1] / "events.csv"
    log.unlink()
    with pytest.raises(UserError, match=r"events\.csv: missing; restore the file, or give an empty one"):
        train(tmp_path, FedBuff(2, 3), rounds=5, ckpt_path=last)
    log.touch()
    assert {row["step"] for row in events(train(tmp_path, FedBuff(2, 3), rounds=5, ckpt_path=last))} == {"4", "5"}


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Clients in flight train from the versions that they have received; MOON's clients keep state."""
    args = ["fit", "--model=MOON", *DIGITS, *ARGS, "--trainer.max_rounds=150", "--trainer.callbacks+=Checkpoints",
            "--trainer.callbacks.every_n_rounds=3"]  # fmt: skip
    broken = killed(*args, root=tmp_path / "broken")
    fit("fit", *ARGS, "--trainer.max_rounds=150", "--ckpt_path=last", root=tmp_path / "broken", model="MOON")
    reference = fit("fit", *ARGS, "--trainer.max_rounds=150", root=tmp_path / "whole", model="MOON")
    assert_same(state(broken), state(reference))
    assert metrics(broken) == metrics(reference)
    assert (broken / "events.csv").read_text() == (reference / "events.csv").read_text()
    assert max(value for _, value in metrics(reference)["client/staleness"]) > 0


@pytest.mark.slow
def test_two_processes_have_the_same_bits(tmp_path: Path) -> None:
    single = fit("fit", *ARGS, "--trainer.max_rounds=12", root=tmp_path / "whole", model="MOON")
    parallel = launch(2, "fit", "--model=MOON", *DIGITS, *ARGS, "--trainer.max_rounds=12", cwd=tmp_path)
    assert_same(state(parallel), state(single))
    assert (parallel / "events.csv").read_text() == (single / "events.csv").read_text()
