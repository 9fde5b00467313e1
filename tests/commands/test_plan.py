"""What a plan predicts is what a run does, as far as no clock is concerned; and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fl_lightning import (
    SCAFFOLD,
    BernoulliSampler,
    Callback,
    Checkpoints,
    Clock,
    Corrupt,
    Digits,
    DigitsMLP,
    Discrepancy,
    Faults,
    FedAvg,
    FedBuff,
    FederatedTrainer,
    FlatnessMonitor,
    GaussianPrivacy,
    ImageFolder,
    LambdaMax,
    MultiKrum,
    NaiveFedGloSS,
    SemiSynchronous,
    Stragglers,
)
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.commands.plan import plan
from fl_lightning.commands.shared.prediction import as_time, data_or_like, due, makespan
from fl_lightning.core.errors import UserError
from fl_lightning.data import images
from fl_lightning.data.streaming import Published
from tests.runs import DIGITS, cli, forked, metrics, newest


def trainer(root: Path, **options: Any) -> FederatedTrainer:
    fixed: dict[str, Any] = {"engine": "sequential", "accelerator": "cpu", "threads": 1, "enable_progress_bar": False}
    return FederatedTrainer(
        **{"max_rounds": 5, "clients_per_round": 3, **fixed, "default_root_dir": str(root), **options}
    )


def digits() -> Digits:
    return Digits(num_clients=6, batch_size=32)


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("algorithm", [FedAvg, SCAFFOLD, NaiveFedGloSS])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_bits_are_those_that_fit_logs(algorithm: type[LocalObjective], precision: str, tmp_path: Path) -> None:
    """There are cohorts of random size, more rounds than are measured, and an algorithm of two phases."""
    options: dict[str, Any] = {
        "sampler": BernoulliSampler(0.4),
        "max_rounds": 25,
        "precision": precision,
        "eval_every": 25,
    }
    prediction = plan(trainer(tmp_path, **options), algorithm(DigitsMLP(hidden=4)), digits(), devices=2)
    assert prediction.measured < 25
    run = trainer(tmp_path, **options).fit(algorithm(DigitsMLP(hidden=4)), digits())
    assert prediction.bits == run.metrics["comm/total_bits"]


KINDS: dict[str, dict[str, Any]] = {
    "faults": {"faults": Faults(drop_before=0.2, drop_after=0.2, stragglers=Stragglers(4.0, "lost")), "local_steps": 5},
    "aggregation": {"aggregation": MultiKrum(), "clients_per_round": 5},
    "privacy": {
        "privacy": GaussianPrivacy(noise_multiplier=0.5, delta=0.1, noise_seed=0),
        "sampler": BernoulliSampler(0.5),
    },
    "on_divergence": {"faults": Faults(corrupt=Corrupt(1.0)), "on_divergence": "continue"},
    "hardly anybody": {"sampler": BernoulliSampler(0.1), "max_rounds": 60},
}
SLOW: dict[str, Any] = {"sec_per_sample": 0.01, "sigma": 1.0, "up_mbps": 0.01}
CLOCKS: dict[str, dict[str, Any]] = {
    "deadline": {"clock": Clock(**SLOW, deadline_s=15.0, late="partial"), "faults": Faults(0.1, 0.1)},
    "over_selection": {"clock": Clock(**SLOW, over_selection=1.5), "clients_per_round": 4},
    "max_time_s": {"clock": Clock(**SLOW, max_time_s=500.0), "eval_every": 3, "eval_last": 5},
    "FedBuff": {"clock": Clock(**SLOW), "asynchronous": FedBuff(2, 4), "faults": Faults(0.1, 0.1)},
    "SemiSynchronous": {
        "clock": Clock(**SLOW, max_time_s=250.0),
        "asynchronous": SemiSynchronous(10.0, max_staleness=1),
    },
}


class Seen(Callback):
    """Notes the rule, the faults and the ending of the run that it is called by."""

    found: ClassVar[list[Any]] = []

    def on_fit_start(self, run: Any) -> None:
        kept = [getattr(run.settings, name) for name in ("faults", "aggregation", "on_divergence", "sampler")]
        self.found.append((kept, run.metrics))

    def on_round_end(self, run: Any) -> None:
        self.found[-1] = (self.found[-1][0], run.metrics)


@pytest.mark.sampled(quick=6, slow=3)
@pytest.mark.parametrize("kind", KINDS)
def test_measures_the_run_that_is_planned(kind: str, tmp_path: Path) -> None:
    """It has the run's rule, faults and privacy, and thus its bits; a cohort may be empty."""
    options = {"max_rounds": 40, "eval_every": 40, **KINDS[kind]}
    Seen.found.clear()
    mine, algorithm = trainer(tmp_path, **options, callbacks=[Seen()]), NaiveFedGloSS if kind == "faults" else FedAvg
    prediction = plan(mine, algorithm(DigitsMLP(hidden=4), weighting="uniform"), digits())
    run = mine.fit(algorithm(DigitsMLP(hidden=4), weighting="uniform"), digits())
    (planned, metrics), (trained, _) = Seen.found
    assert planned == trained
    assert metrics.keys() >= run.metrics.keys() - {"client/train/loss"}
    assert prediction.measured < mine.max_rounds
    assert prediction.bits == run.metrics["comm/total_bits"]
    assert prediction.parts["local training"][1] > 0


def test_a_run_that_max_time_ends(tmp_path: Path) -> None:
    prediction = plan(trainer(tmp_path, max_time="00:00:00"), FedAvg(DigitsMLP(hidden=4)), digits())
    assert (prediction.rounds, prediction.parts["local training"][0], prediction.bits) == (1, 1, 3 * 2 * 32 * 310)
    assert plan(trainer(tmp_path, max_time="01:00:00"), FedAvg(DigitsMLP(hidden=4)), digits()).rounds == 5


@pytest.mark.sampled(quick=5, slow=3)
@pytest.mark.parametrize("kind", CLOCKS)
def test_the_clock_of_the_devices(kind: str, tmp_path: Path) -> None:
    """It tells who is late, when the run ends, and what counts; a server without rounds takes steps."""
    options = {"max_rounds": 40, "eval_every": 40, **CLOCKS[kind]}
    prediction, mine = (
        plan(trainer(tmp_path, **options), FedAvg(DigitsMLP(hidden=4)), digits()),
        trainer(tmp_path, **options),
    )
    run = mine.fit(FedAvg(DigitsMLP(hidden=4)), digits())
    assert prediction.device_seconds == run.metrics["clock/time_s"]
    assert (prediction.bits, prediction.rounds) == (run.state.total_bits, run.rounds_done)
    assert prediction.late == sum(run.state.failures.get("late", {}).values())
    assert prediction.late > 0 or kind in ("max_time_s", "FedBuff")
    logged = metrics(run.folder.path)
    assert (prediction.rounds < 40) == (mine.clock is not None and mine.clock.max_time_s < 1e9)
    assert prediction.parts["evaluation (test)"][0] == len(logged["server/test/acc"])
    assert prediction.unit == ("rounds" if mine.asynchronous is None else "steps of the server")
    prediction.show()


def test_nobody_ever_takes_part(tmp_path: Path) -> None:
    """Nothing is divided by the number of clients."""
    options: dict[str, Any] = {"sampler": BernoulliSampler(0.1), "faults": Faults(available=[[]]), "max_rounds": 3}
    prediction = plan(trainer(tmp_path, **options), FedAvg(DigitsMLP(hidden=4)), digits())
    assert (prediction.bits, prediction.measured, prediction.parts["local training"]) == (0, 3, (3, 0.0))


@pytest.mark.parametrize(("rounds", "every", "expected"), [(10, 5, 2), (11, 5, 3), (4, 5, 1), (1, 1, 1), (7, 1, 7)])
def test_due_in_the_last_round_too(rounds: int, every: int, expected: int) -> None:
    assert due(rounds, every) == expected


@pytest.mark.slow
def test_rounds_are_counted_as_fit_does_them(tmp_path: Path) -> None:
    def listeners() -> list[Any]:
        return [FlatnessMonitor(4, [LambdaMax(samples=50, iterations=3), Discrepancy()]), Checkpoints(3, keep_all=True)]

    options: dict[str, Any] = {"max_rounds": 11, "eval_every": 5}
    data = Digits(num_clients=6, batch_size=32, val_fraction=0.1)
    prediction = plan(trainer(tmp_path, callbacks=listeners(), **options), FedAvg(DigitsMLP(hidden=4)), data)
    trainer(tmp_path, callbacks=listeners(), **options).fit(FedAvg(DigitsMLP(hidden=4)), data)
    logged = metrics(newest(tmp_path))
    counts = {name: times for name, (times, _) in prediction.parts.items()}
    assert counts["local training"] == len(logged["client/train/loss"]) == 11
    assert counts["evaluation (test)"] == len(logged["server/test/acc"]) == 3
    assert counts["evaluation (val)"] == len(logged["server/val/acc"]) == 3
    assert counts["FlatnessMonitor"] == len(logged["flatness/lambda_max"]) == 3
    assert counts["Checkpoints"] == len(list((newest(tmp_path) / "checkpoints").glob("round_*.ckpt"))) == 4
    assert all(prediction.parts[name][1] > 0 for name in ("local training", "FlatnessMonitor", "Checkpoints"))


class Sleeps(Callback):
    """Takes time at the start of rounds."""

    def __init__(self, seconds: float, every_n_rounds: int) -> None:
        self.seconds, self.every_n_rounds = seconds, every_n_rounds

    def on_round_start(self, run: Any, ctx: Any, cohort: Any) -> None:
        time.sleep(self.seconds)


def test_time_at_the_start_of_rounds_counts(tmp_path: Path) -> None:
    """It counts for each of two callbacks of one class by itself."""
    prediction = plan(
        trainer(tmp_path, callbacks=[Sleeps(0.02, 4), Sleeps(0.0, 2)], max_rounds=8), FedAvg(DigitsMLP(4)), digits()
    )
    (slow_count, slow_seconds), (fast_count, fast_seconds) = prediction.parts["Sleeps"], prediction.parts["Sleeps.1"]
    assert (slow_count, fast_count) == (2, 4) and fast_seconds < 0.02 <= slow_seconds


def test_memory_counts_the_rows_of_clients_not_seen_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client's row is there at the end, and once more in a checkpoint, though few were seen while measured."""
    monkeypatch.setattr("fl_lightning.commands.shared.prediction.peak_memory", lambda: 0)
    options: dict[str, Any] = {"max_rounds": 60, "clients_per_round": 1, "eval_every": 60}
    data, mine = Digits(num_clients=40, batch_size=64), trainer(tmp_path, **options)
    prediction = plan(mine, SCAFFOLD(DigitsMLP()), data)
    row = 4 * sum(p.numel() for p in DigitsMLP().parameters())
    cohorts = [mine.sampler(t, 40, mine.seed) for t in range(60)]
    unseen = len(set().union(*cohorts)) - len(set().union(*cohorts[: prediction.measured]))
    assert prediction.memory == 2 * unseen * row > 0 and prediction.device_memory == 0


def test_amounts_have_no_exponent() -> None:
    seconds = [4_444_200.0, 3_598_920.0, 12.0, 0.01234]
    assert [as_time(value) for value in seconds] == ["1,234 h", "1,000 h", "12 s", "12.3 ms"]


def test_makespan_of_the_busiest_process() -> None:
    """A gets 5 and 3, B gets 4, 3 and 3: A makes 8 steps, B 10."""
    assert makespan([3, 5, 3, 4, 3], 2) == 10
    assert makespan([3, 5, 3, 4, 3], 1) == 18
    assert makespan([3, 5], 8) == 5


def test_makespan_of_a_block_is_that_of_its_longest() -> None:
    assert makespan([3, 5, 2], 1, "sequential") == makespan([3, 5, 2], 1, "debug") == 10
    assert makespan([3, 5, 2], 1, "batched") == 5
    assert makespan([3, 5, 2], 1, "graphed", block=2) == 5 + 2
    assert makespan([1, 5, 2, 5], 1, "graphed", block=2) == 5 + 2  # blocks are of clients with similar numbers of steps
    assert makespan([], 1, "batched") == 0
    assert makespan([3, 5, 3, 4, 3], 2, "batched") == 5


def test_processes_change_no_counts_and_no_bits(tmp_path: Path) -> None:
    one, four = (plan(trainer(tmp_path), SCAFFOLD(DigitsMLP(hidden=4)), digits(), n) for n in (1, 4))
    assert one.bits == four.bits
    assert {name: times for name, (times, _) in one.parts.items()} == {
        name: times for name, (times, _) in four.parts.items()
    }


def test_trainer_and_model_stay_as_they_are(tmp_path: Path) -> None:
    root, model, monitor = tmp_path / "runs", SCAFFOLD(DigitsMLP(hidden=4)), FlatnessMonitor(every_n_rounds=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = trainer(root, callbacks=[monitor])
    settings, threads = dict(vars(mine)), torch.get_num_threads()
    plan(mine, model, digits(), devices=2)
    assert not root.exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert vars(mine) == settings
    assert monitor.every_n_rounds == 7 and torch.get_num_threads() == threads


def test_no_advice_on_a_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would advise to start the command by srun."""
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        plan(trainer(tmp_path, max_rounds=1), FedAvg(DigitsMLP(hidden=4)), digits())
    assert not [warning for warning in shown if "srun" in str(warning.message)]


@pytest.mark.parametrize(("key", "value"), [("devices", 0), ("nodes", -1)], ids=lambda value: str(value))
def test_numbers_out_of_range(key: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{key} = {value}: "):
        plan(trainer(tmp_path), FedAvg(DigitsMLP(hidden=4)), digits(), **{key: value})


def test_engine_is_that_of_the_config(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "graphed", "clients_per_round": 6, "max_rounds": 3}
    assert plan(trainer(tmp_path, **options), FedAvg(DigitsMLP(hidden=4)), digits(), devices=2).engine == "graphed"


def test_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    args = ["plan", "--model=SCAFFOLD", *DIGITS, "--devices=2", "--nodes=2"]
    with forked(*args, cwd=tmp_path) as child:
        out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    assert "local training" in out and "on the wire: 468,480 bits" in out
    assert list(tmp_path.iterdir()) == []


def test_command_takes_devices_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--trainer.devices=3", "--trainer.num_nodes=2", "--trainer.strategy=ddp", "--json=true"]
    cli("plan", "--model=FedAvg", *DIGITS, *args, f"--trainer.default_root_dir={tmp_path / 'runs'}")
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["processes"] == 6
    assert prediction["seconds"] == pytest.approx(
        sum(count * seconds for count, seconds in prediction["parts"].values())
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("--devices=0", "devices = 0: give a whole number of at least 1"),
        ("--trainer.max_rounds=1000000000000", "trainer.max_rounds = 1000000000000: at most 1,000,000 to go through"),
        ("--devices=two", "devices = two: expected a whole number"),
        ("--trainer.devices=auto", "trainer.devices = auto: give their number by --devices"),
    ],
)
def test_mistake_is_one_line(arg: str, says: str) -> None:
    with pytest.raises(SystemExit) as exit:
        cli("plan", "--model=FedAvg", *DIGITS, arg)
    assert exit.value.code == f"error: {says}"


@pytest.mark.slow
def test_missing_files_are_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published data set is replaced by random samples of its numbers and shape, and the plan says so."""
    monkeypatch.setitem(images.PUBLISHED, "CIFAR10", Published(400, 100, (32, 32, 3), classes=10))
    lines = ["--data.partition=FromFile", f"--data.partition.path={tmp_path / 'no.json'}", "--data.download=true"]
    small = [
        "--trainer.max_rounds=5",
        "--trainer.clients_per_round=2",
        "--trainer.accelerator=cpu",
        "--model.net.hidden=[4]",
    ]
    model = ["--model=FedAvg", "--model.net=FullyConnected", "--model.net.in_features=3072"]
    cli("plan", *model, "--data=CIFAR10", f"--data.data_dir={tmp_path}", *lines, *small)
    output = capsys.readouterr()
    assert "5 rounds" in output.out and not list(tmp_path.iterdir())
    assert output.err.startswith(
        f"on random samples of the same shape: data.data_dir = {tmp_path}: CIFAR10 cannot be read"
    )
    source = Digits(num_clients=4)
    data, reason = data_or_like(source)
    assert reason is None and data.y_train.shape == (1437,) and not hasattr(source, "clients")
    with pytest.raises(UserError, match="no images of each class"):
        data_or_like(ImageFolder(str(tmp_path), image_size=8))


@pytest.mark.parametrize("stream", [False, True])
def test_random_samples_have_the_published_form(stream: bool) -> None:
    known = Published(30, 20, (4, 4, 3), classes=10)
    x, y, x_test, y_test = known.random(stream)
    assert (len(x), len(x_test), {*y}, {*y_test}) == (30, 20, {*range(10)}, {*range(10)})
    assert all(np.asarray(inputs[0]).shape == (4, 4, 3) and inputs[0].dtype == np.uint8 for inputs in (x, x_test))
    tokens = Published(30, 20, (7,), classes=4, tokens=50).random(stream)[0]
    assert np.asarray(tokens[0]).shape == (7,) and 2 < max(np.asarray(tokens[i]).max() for i in range(30)) < 50
