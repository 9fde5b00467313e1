"""The virtual clock: seconds by hand, and a run that does not notice it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import (
    SAM,
    SCAFFOLD,
    Arrays,
    BernoulliSampler,
    Callback,
    Clock,
    Compress,
    Faults,
    FedAvg,
    FederatedTrainer,
    FedGMT,
    GaussianPrivacy,
    LocalObjective,
    NaiveFedGloSS,
    Personal,
    ReplaySampler,
    Stragglers,
    UniformSampler,
    UserError,
)
from fl_lightning.results import summarise
from fl_lightning.trainer.participation.clock import Device, read_devices
from fl_lightning.trainer.run import Run
from tests.integration.test_processes import launch
from tests.runs import DIGITS, metrics
from tests.runs import run as fit

CSV = "device,sec_per_sample,down_mbps,up_mbps,latency_s\na,0.5,0.001,0.002,0.25\nb,0.125,0.004,0.001,1\n"
SIZES = 11, 6, 8
D = 2 * 3 + 3


def data() -> Arrays:
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 2)) for n in (*SIZES, 5)]
    y = [np.arange(len(inputs)) % 3 for inputs in x]
    return Arrays(client_arrays=list(zip(x, y, strict=True))[:3], test=(x[3], y[3]), batch_size=4)


def train(folder: Path, kind: Any = FedAvg, clock: Clock | None = None, rounds: int = 2, **options: Any) -> Run:
    torch.manual_seed(0)
    net = nn.Linear(2, 3)
    model_options = {key: options.pop(key) for key in ("ascent", "parts") if key in options}
    trainer = FederatedTrainer(
        max_rounds=rounds, accelerator="cpu", threads=1, enable_progress_bar=False, default_root_dir=str(folder),
        clock=clock, **{"engine": "sequential", "clients_per_round": 3, **options},
    )  # fmt: skip
    return trainer.fit(kind(net, **model_options), data())


class Counting(LocalObjective):
    """Weighs clients by their classes."""

    up = ("aw", "a")
    uses_class_counts = needs_classes = True

    def local_end(self, w: torch.Tensor, client: Any, received: Any, ctx: Any) -> Any:
        a = (ctx.class_counts > 0).to(w).mean(-1, keepdim=True)
        return {"aw": a * w, "a": a}, client

    def server_step(self, server: Any, sent: Any, uploads: Any, ctx: Any) -> Any:
        return server.replace(w=uploads.mean("aw") / uploads.mean("a"))


def test_class_counts_at_the_end_of_local_training(tmp_path: Path) -> None:
    run = train(tmp_path, Counting, Clock(sec_per_sample=0.5))
    assert run.contract[0].bits == (32 * D, 32 * (D + 1))


def file(folder: Path, **options: Any) -> Clock:
    (folder / "devices.csv").write_text(CSV)
    return Clock(devices=str(folder / "devices.csv"), **options)


@pytest.mark.parametrize(
    ("kind", "options", "passes", "numbers"),
    [
        (FedAvg, {}, (1, 1), (D, D)),
        (FedAvg, {"ascent": SAM(0.1)}, (2, 2), (D, D)),
        (FedAvg, {"local_steps": 4}, (1, 1), (D, D)),
        (SCAFFOLD, {}, (1, 1), (2 * D, 2 * D)),
        (FedGMT, {}, (2, 1), (2 * D, D)),
        (NaiveFedGloSS, {}, (1, 1), None),
        (FedAvg, {"parts": [Personal(["bias"])]}, (1, 1), (6, 6)),
    ],
)
def test_seconds_by_hand(kind: Any, options: Any, passes: Any, numbers: Any, tmp_path: Path) -> None:
    """The slowest of three clients decides; the third has the device of one of the two before."""
    clock = file(tmp_path)
    run = train(tmp_path, kind, clock, **options)
    assert run.timing is not None
    devices = [run.timing.device(k) for k in range(3)]
    assert {*devices} == {*clock.rows} and devices[2] == devices[0]
    steps = options.get("local_steps")
    samples = list(SIZES) if steps is None else [4 + 4 + 3 + 4, 4 + 2 + 4 + 2, 4 * 4]
    spent = []
    for device, n in zip(devices, samples, strict=True):
        compute = n * (passes[0] + 2 * passes[1]) * device.sec_per_sample
        down, up = (32 * count for count in numbers or (0, 0))
        spent.append((compute, down / device.down_mbps / 1e6 + up / device.up_mbps / 1e6 + 2 * device.latency_s))
    if numbers is None:  # two phases, two exchanges
        assert run.metrics["clock/comm_s"] > 2 * 2 * sum(2 * device.latency_s for device in devices)
        return
    slowest = max(map(sum, spent))
    expected = {
        "time_s": 2 * slowest,
        "compute_s": 2 * sum(compute for compute, _ in spent),
        "comm_s": 2 * sum(comm for _, comm in spent),
        "idle_s": 2 * sum(slowest - compute - comm for compute, comm in spent),
    }
    for name, value in expected.items():
        assert run.metrics[f"clock/{name}"] == pytest.approx(value, rel=1e-12), name


class TwiceLater(LocalObjective):
    """Trains in two phases, in the second one with two gradients a step."""

    phases = 2

    def local_step(self, w: torch.Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        g = grad(w)
        return (g + grad(w) if ctx.phase else g), client


def test_each_phase_takes_the_time_of_its_own_passes(tmp_path: Path) -> None:
    """A gradient is one pass forward, and one backward, which takes two: nine in both phases together."""
    run = train(tmp_path, TwiceLater, Clock(sec_per_sample=0.5, sigma=0), rounds=1)
    assert run.metrics["clock/compute_s"] == pytest.approx(9 * 0.5 * sum(SIZES), rel=1e-12)
    late = train(tmp_path, TwiceLater, Clock(sec_per_sample=0.5, sigma=0, deadline_s=24, late="partial"), rounds=1)
    # a step of four samples takes 6 seconds in the first phase, and 12 in the second one
    assert late.metrics["clock/compute_s"] == pytest.approx(1.5 * sum(SIZES) + 3 * (8 + 6 + 8), rel=1e-12)


def test_training_before_the_round_takes_time_and_no_exchange(tmp_path: Path) -> None:
    """FedRep: the head's epochs of a client come before its epoch of the body."""
    plain, alone = (
        train(tmp_path, FedAvg, file(tmp_path), parts=[Personal(["bias"], epochs_alone=epochs)]) for epochs in (0, 2)
    )
    assert alone.metrics["clock/comm_s"] == plain.metrics["clock/comm_s"]
    assert alone.metrics["clock/compute_s"] == pytest.approx(3 * plain.metrics["clock/compute_s"], rel=1e-12)


def test_the_run_does_not_notice(tmp_path: Path) -> None:
    clock = Clock(sec_per_sample=0.1, down_mbps=1.0, up_mbps=0.1, latency_s=0.1, server_s=1.0)
    timed, untimed = (train(tmp_path, SCAFFOLD, choice, engine="graphed") for choice in (clock, None))
    assert all(torch.equal(timed.server[name], untimed.server[name]) for name in untimed.server)
    times = [dict(metrics(run.folder.path)) for run in (timed, untimed)]
    assert {n for n in times[0] if not n.startswith(("clock/", "time/"))} == {
        n for n in times[1] if not n.startswith("time/")
    }
    assert times[0]["clock/time_s"][1][1] == 2 * times[0]["clock/time_s"][0][1]
    doubled = train(
        tmp_path, SCAFFOLD, Clock(sec_per_sample=0.2, down_mbps=0.5, up_mbps=0.05, latency_s=0.2, server_s=2)
    )
    assert doubled.metrics["clock/time_s"] == pytest.approx(2 * timed.metrics["clock/time_s"], rel=1e-12)


def seconds(run: Run, t: int, K: dict[int, int] | None = None) -> dict[int, float]:
    """Seconds of each client of a round in which all count, in the cohort's order."""
    assert run.timing is not None
    steps = {k: -(-SIZES[k] // 4) for k in run.settings.sampler(t, 3, run.seed)}
    return {k: sum(run.timing.spent(k, (K or steps)[k])) for k in steps}


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, NaiveFedGloSS])
def test_an_infinite_deadline_is_none(kind: Any, tmp_path: Path) -> None:
    """Every client is done in 1e9 seconds."""
    plain, patient = (train(tmp_path, kind, clock) for clock in (file(tmp_path), file(tmp_path, deadline_s=1e9)))
    assert all(torch.equal(plain.server[name], patient.server[name]) for name in plain.server)
    assert patient.metrics["clock/time_s"] == plain.metrics["clock/time_s"]


def test_who_misses_the_deadline_is_as_if_not_drawn(tmp_path: Path) -> None:
    """Clients that are late keep their state, and take the round to its deadline."""
    open_end = train(tmp_path, SCAFFOLD, file(tmp_path), rounds=1)
    times = seconds(open_end, 0)
    slow = max(times, key=times.__getitem__)
    clock = file(tmp_path, deadline_s=sorted(times.values())[1])
    strict = train(tmp_path, SCAFFOLD, clock, rounds=3)
    replayed = train(tmp_path, SCAFFOLD, file(tmp_path), rounds=3, sampler=ReplaySampler([[*({*times} - {slow})]] * 3))
    assert all(torch.equal(strict.server[name], replayed.server[name]) for name in strict.server)
    assert slow not in strict.clients.rows()
    assert strict.metrics["client/late"] == 1 and strict.state.failures["late"] == {slow: 3}
    assert strict.metrics["clock/time_s"] == 3 * (clock.deadline_s or 0)
    down, up = strict.contract[0].bits
    assert strict.state.total_bits == 3 * (3 * down + 2 * up)
    counts = {name: value for name, value in strict.metrics.items() if "uploads" in name and value}
    assert counts == {"clock/uploads_4": 3, "clock/uploads_7": 3}  # of three clients, in order of their times
    assert summarise(strict.folder.path).slow_uploads == 0 and summarise(replayed.folder.path).slow_uploads is None
    with pytest.warns(UserWarning, match=r"^trainer\.clock\.deadline_s = 0\.001: nobody is done") as caught:
        nobody = train(tmp_path, SCAFFOLD, file(tmp_path, deadline_s=1e-3), rounds=2)
    assert ["nobody" in str(warning.message) for warning in caught].count(True) == 1
    assert torch.equal(nobody.server.w, nobody.clients.w0) and nobody.metrics["clock/time_s"] == 2e-3


def test_partial_work_until_the_deadline(tmp_path: Path) -> None:
    """As many whole steps as there is time for; the run is that of stragglers with as many steps."""
    run = train(tmp_path, FedAvg, file(tmp_path), rounds=1, local_steps=5)
    times = {k: [seconds(run, 0, dict.fromkeys(range(3), K))[k] for K in range(1, 6)] for k in range(3)}
    deadline = sorted(times[0] + times[1] + times[2])[8]
    done = {k: sum(time <= deadline for time in times[k]) for k in times}
    assert 0 < min(done.values()) < 5
    steps: dict[int, tuple[int, int]] = {}

    class See(Callback):
        def on_local_end(self, run: Run, result: Any) -> None:
            steps[result.client] = result.ctx.K, result.ctx.K_missed

    clock = file(tmp_path, deadline_s=deadline, late="partial")
    late = train(tmp_path, FedAvg, clock, rounds=1, local_steps=5, callbacks=[See()])
    assert steps == {k: (n, 5 - n) for k, n in done.items() if n}
    assert late.metrics["clock/time_s"] == deadline and late.metrics["client/late"] == sum(n < 5 for n in done.values())


def test_the_first_who_are_done_count(tmp_path: Path) -> None:
    """Of three that are drawn the first two count; a round takes until the second one is done."""
    clock = file(tmp_path, over_selection=1.5)
    run = train(tmp_path, SCAFFOLD, clock, rounds=2, clients_per_round=2)
    times = seconds(run, 0)
    first = sorted(sorted(times, key=times.__getitem__)[:2])
    replayed = train(tmp_path, SCAFFOLD, file(tmp_path), rounds=2, sampler=ReplaySampler([first] * 2))
    assert all(torch.equal(run.server[name], replayed.server[name]) for name in run.server)
    assert run.metrics["clock/time_s"] == replayed.metrics["clock/time_s"] == 2 * max(times[k] for k in first)
    assert run.state.failures["late"] == {k: 2 for k in times if k not in first}
    assert vars(Clock(sec_per_sample=1, over_selection=1.1).enlarged(UniformSampler(10))[0])["clients_per_round"] == 11


def test_the_clock_ends_a_run(tmp_path: Path) -> None:
    round_time = train(tmp_path, FedAvg, file(tmp_path), rounds=1).metrics["clock/time_s"]
    assert train(tmp_path, FedAvg, file(tmp_path, max_time_s=2.5 * round_time), rounds=9).rounds_done == 3


def test_a_shorter_upload_takes_less_time(tmp_path: Path) -> None:
    full, short = (train(tmp_path, FedAvg, file(tmp_path), parts=parts) for parts in ([], [Compress("sign")]))
    assert short.metrics["clock/comm_s"] < full.metrics["clock/comm_s"]
    assert short.metrics["clock/compute_s"] == full.metrics["clock/compute_s"]


ARGS = ["--data.num_clients=6", "--trainer.max_rounds=4", "--trainer.clients_per_round=4", "--trainer.clock=Clock",
        "--trainer.clock.sec_per_sample=0.01", "--trainer.clock.up_mbps=0.1"]  # fmt: skip


@pytest.mark.slow
def test_two_processes_have_the_same_times(tmp_path: Path) -> None:
    single = metrics(fit("fit", *ARGS, root=tmp_path / "whole", model="SCAFFOLD"))
    parallel = metrics(launch(2, "fit", "--model=SCAFFOLD", *DIGITS, *ARGS, cwd=tmp_path))
    for name in ("time_s", "compute_s", "comm_s", "idle_s"):
        assert parallel[f"clock/{name}"] == single[f"clock/{name}"]


def test_a_resumed_run_has_the_same_times(tmp_path: Path) -> None:
    reference = metrics(fit("fit", *ARGS, root=tmp_path / "whole", model="FedAvg"))["clock/time_s"]
    half = fit("fit", *ARGS, "--trainer.max_rounds=2", root=tmp_path / "half", model="FedAvg")
    fit("fit", *ARGS, "--ckpt_path", str(half / "checkpoints/last.ckpt"), root=tmp_path / "half", model="FedAvg")
    assert metrics(half)["clock/time_s"] == reference
    assert [t for t, _ in reference] == [1, 2, 3, 4]


def test_fedscales_file(tmp_path: Path) -> None:
    text = json.dumps({"1": {"computation": 50.0, "communication": 4000.0}})
    (tmp_path / "of.json").write_text(text)
    assert read_devices(str(tmp_path / "of.json"), "x") == [Device(0.05, 4.0, 4.0, 0.0)]
    for wrong in (text.replace("communication", "speed"), text.replace("50.0", "1" * 400)):
        (tmp_path / "half.JSON").write_text(wrong)
        with pytest.raises(UserError, match=r"not a JSON file with computation and communication by device \((K|Ov)"):
            read_devices(str(tmp_path / "half.JSON"), "x")


def test_rows_count_in_their_order(tmp_path: Path) -> None:
    """They do, whatever their names; blanks after commas are no part of a name."""
    path = tmp_path / "devices.csv"
    path.write_text("device, sec_per_sample, down_mbps, up_mbps, latency_s\n1, 0.5, 1, 1, 0\n0, 0.25, 2, 2, 0\n")
    assert read_devices(str(path), "x") == [Device(0.5, 1, 1, 0), Device(0.25, 2, 2, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; give a CSV file with device, sec_per_sample, down_mbps, up_mbps, latency_s"),
        (
            "device,speed\na,1\n",
            "not a CSV file with device, sec_per_sample, down_mbps, up_mbps, latency_s (KeyError: ",
        ),
        *((CSV.replace(*swap), "speeds are above 0") for swap in (("0.5", "0"), ("0.002", "nan"), ("0.25", "inf"))),
        (CSV.splitlines()[0], "speeds are above 0, and times finite; give at least one device"),
        (
            CSV.replace("0.002", "0,002"),
            "not a CSV file with device, sec_per_sample, down_mbps, up_mbps, latency_s (ValueE",
        ),
    ],
)
def test_files_that_hold_no_devices(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"trainer.clock.devices = {path}: {message}")):
        Clock(devices=str(path))


def test_times_that_floats_cannot_add(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^trainer\.clock: client 0 takes 3\.3e\+301 seconds; give .* at most 1e\+15$"):
        train(tmp_path, clock=Clock(sec_per_sample=1e300, sigma=0))


@pytest.mark.parametrize("options", [{}, {"devices": "x.csv", "sec_per_sample": 1.0}])
def test_file_or_median(options: Any) -> None:
    with pytest.raises(UserError, match=r"^trainer\.clock: give either devices, a CSV file, or sec_per_sample"):
        Clock(**options)


@pytest.mark.parametrize(
    ("options", "clock", "message"),
    [
        ({"faults": Faults(stragglers=Stragglers(3))}, {"deadline_s": 1.0}, "trainer.clock.deadline_s: trainer.fa"),
        ({"sampler": BernoulliSampler(0.5)}, {"over_selection": 2.0}, "trainer.clock.over_selection = 2.0: only with "),
        ({"privacy": GaussianPrivacy(1, 1)}, {"over_selection": 2.0}, "trainer.clock.over_selection = 2.0: only with "),
        (
            {"parts": [Personal(["bias"], epochs_alone=1)]},
            {"deadline_s": 1.0, "late": "partial"},
            "trainer.clock.late = partial: clients also train before the round; set it to lost",
        ),
        (
            {},
            {"over_selection": 1.2},
            "trainer.clients_per_round = 4 (or that of trainer.sampler, or by trainer.clock.over_selection): there",
        ),
    ],
)
def test_what_does_not_go_together(options: Any, clock: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        train(tmp_path, clock=file(tmp_path, **clock), **options)
