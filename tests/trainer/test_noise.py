"""The noise of a private run: whose key it is, where the key goes, when it replays, and the grid of its values."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import (
    AdaptivePrivacy,
    BernoulliSampler,
    Callback,
    Checkpoints,
    Clock,
    Curves,
    Faults,
    FedAvg,
    GaussianPrivacy,
    UniformSampler,
    UserError,
    WandbLogger,
)
from fl_lightning.core import State
from fl_lightning.trainer.aggregation.base import Received
from fl_lightning.trainer.aggregation.noise import BLOCK, NoiseKey, box_muller, cut, grid, rounded
from fl_lightning.trainer.loggers.base import FigureLogger
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage import checkpoint
from tests.problem import Golden
from tests.runs import assert_same, metrics
from tests.trainer.test_privacy import D, bound, draws, fit, received, release

KEY = NoiseKey.of_seed(0)


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests has a program with a file, as `fl-lightning` has; without one the key is always new."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


# The stream


def test_stream_is_a_function_of_key_and_names() -> None:
    """It comes in blocks, so that memory is bounded; no draw is a part of another one."""
    n = 2 * BLOCK + 5
    x = KEY.normal(n, "noise", 0, 0, "w")
    assert x.dtype == torch.float64 and x.shape == (n,)
    assert torch.equal(x, NoiseKey.of_seed(0).normal(n, "noise", 0, 0, "w"))
    others = [NoiseKey.of_seed(1).normal(n, "noise", 0, 0, "w"), NoiseKey.fresh().normal(n, "noise", 0, 0, "w")]
    others += [KEY.normal(n, *names) for names in (("noise", 1, 0, "w"), ("noise", 0, 1, "w"), ("noise", 0, 0, "c"))]
    others += [x.roll(BLOCK)]
    for other in others:
        assert abs(float((x * other).mean())) < 5 / n**0.5
        assert not (x == other).any()
    assert len(KEY.normal(0, "noise")) == 0


def test_stream_is_normal() -> None:
    """Its moments are, and its distribution by the Kolmogorov-Smirnov test."""
    x = KEY.normal(400_000, "normal").numpy()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * (spread / len(x)) ** 0.5
    cdf = torch.special.ndtr(torch.from_numpy(np.sort(x))).numpy()
    assert np.abs(cdf - np.arange(1, len(x) + 1) / len(x)).max() < 1.9 / len(x) ** 0.5
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / len(x) ** 0.5


def test_extreme_bits_are_finite_numbers() -> None:
    """All zeros are the farthest number, all ones the nearest."""
    far, near = (box_muller(bits * 16) for bits in (b"\0", b"\xff"))
    assert far == pytest.approx((2 * np.log(2.0) * 65) ** 0.5) and near == 0


def test_key_is_not_shown() -> None:
    assert "secret" not in repr(KEY) and KEY.secret.hex() not in repr(KEY)
    assert len({NoiseKey.fresh().secret for _ in range(100)}) == 100


# The grid


@pytest.mark.parametrize("std", [1.0, 0.3, 1e-12, 7e5])
def test_releases_lie_on_a_grid_that_is_the_same_for_all_data(std: float) -> None:
    """A power of two far below the noise; what is cut off is no longer than before, and sums are exact."""
    step = grid(std)
    assert np.log2(step) % 1 == 0 and 2.0**-33 <= step / std <= 2.0**-32
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * std
    short, noise = cut(values, step), rounded(values, step)
    for value in (short, noise, short + noise, short.sum(), short.flip(0).sum()):
        assert torch.equal(value / step, (value / step).round())
    assert (short.abs() <= values.abs()).all() and short.sum() == short.flip(0).sum()
    assert float((noise - values).abs().max()) <= step / 2


@pytest.mark.parametrize("privacy", [GaussianPrivacy, AdaptivePrivacy])
def test_sums_and_noise_are_on_the_grid(privacy: Any) -> None:
    """Each release of a rule is a whole multiple of its grid's step, whatever the uploads."""
    rule = bound(privacy(clip=1.5, noise_multiplier=0.7))
    for uploads in ([], draws(3), draws(4, 1e20, seed=1)):
        arrivals = received(uploads, clip=1.5)
        for total, std in rule.sums(arrivals).values():
            assert torch.equal(total / grid(std), (total / grid(std)).round())
        _, sums = release(rule, without_references(arrivals))
        assert float((sums[: 2 * D] / grid(rule.noise_std(1.5)) % 1).abs().max()) == 0


def without_references(arrivals: Received) -> Received:
    """The same with references of 0; others take a release off the grid of its sum."""
    zeros = {name: torch.zeros_like(value) for name, value in arrivals.known.items()}
    return replace(arrivals, known=zeros, server=State({**arrivals.server, "w": zeros["w"]}))


# No two runs share noise


class Moves(Callback):
    """The models of a run."""

    def on_fit_start(self, run: Run) -> None:
        self.w = [run.global_model.clone()]

    def on_round_end(self, run: Run) -> None:
        self.w.append(run.global_model.clone())


@pytest.mark.slow
def test_runs_of_one_seed_share_neither_noise_nor_cohorts(golden: Golden) -> None:
    """With `noise_seed` they share both, for repeats."""
    options: dict[str, Any] = {"sampler": BernoulliSampler(0.5), "max_rounds": 8}

    def run(noise_seed: int | None) -> Any:
        return fit(golden, privacy=GaussianPrivacy(0.5, 1.0, delta=0.1, noise_seed=noise_seed), **options)

    (a, one), (b, other) = run(None), run(None)
    assert [[*x] for x in one.local] != [[*x] for x in other.local]
    first, second = (record.server[1].w - record.server[0].w for record in (one, other))
    assert not (first == second).any() and abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.15
    assert a.aggregation.noise_key != b.aggregation.noise_key
    (_, one), (_, other) = run(5), run(5)
    assert [[*x] for x in one.local] == [[*x] for x in other.local]
    assert_same(one.server[-1], other.server[-1])


class StopAt(Callback):
    """Breaks a run off after some rounds, once."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        if run.rounds_done == self.rounds:
            raise KeyboardInterrupt


def broken_off(golden: Golden, rounds: int, **options: Any) -> Path:
    """The folder of a private run that was to have five rounds; checkpoints of all rounds."""
    with pytest.raises(KeyboardInterrupt):
        private(golden, callbacks=[StopAt(rounds), Checkpoints(1, keep_all=True)], **options)
    return max(golden.folder.glob("*/version_*"))


def private(golden: Golden, privacy: Any = None, model: Any = None, **options: Any) -> Run:
    privacy = privacy or GaussianPrivacy(0.5, 1.0, delta=0.1)
    model = model or FedAvg(golden.net(), weighting="uniform")
    common: dict[str, Any] = {"sampler": BernoulliSampler(0.5), "max_rounds": 5}
    return golden.run(model, privacy=privacy, **{**common, **options})[0]


def resumed(golden: Golden, folder: Path, name: str = "last", **options: Any) -> Run:
    """A copy of a run folder, continued."""
    copy = folder.with_name(f"{folder.name}{len([*folder.parent.iterdir()])}")
    shutil.copytree(folder, copy)
    return private(golden, ckpt_path=str(copy / f"checkpoints/{name}.ckpt"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GaussianPrivacy, AdaptivePrivacy])
def test_newest_checkpoint_replays_its_noise(kind: Any, golden: Golden) -> None:
    """It does with unchanged settings, to the bit; the key is the checkpoint's."""
    privacy = kind(0.5, 1.0, delta=0.1)
    folder = broken_off(golden, 2, privacy=privacy)
    runs = [resumed(golden, folder, privacy=privacy) for _ in range(2)]
    assert all(run.rounds_done == 5 for run in runs)
    assert_same(runs[0].server, runs[1].server)
    for run in runs:
        assert run.aggregation.noise_key is not None
        stored = checkpoint.load(run.folder.last)["noise"]
        assert stored["key"] == run.aggregation.noise_key.secret.hex() == checkpoint.load(folder / LAST)["noise"]["key"]


LAST = "checkpoints/last.ckpt"
CHANGED: dict[str, dict[str, Any]] = {
    "an older checkpoint": {"name": "round_1"},
    "the same round in another file": {"name": "round_2"},
    "local steps": {"local_steps": 2},
    "rounds": {"max_rounds": 6},
    "faults": {"faults": Faults(drop_after=0.1)},
    "engine": {"engine": "batched"},
    "budget": {"privacy": GaussianPrivacy(0.5, 1.0, 100.0, delta=0.1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGED)
def test_anything_else_has_new_noise(change: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken_off(golden, 2)
    run = resumed(golden, folder, **CHANGED[change])
    assert run.aggregation.noise_key is not None
    assert run.aggregation.noise_key.secret.hex() != checkpoint.load(folder / LAST)["noise"]["key"]
    assert "privacy: new noise and cohorts from round" in capsys.readouterr().out


@pytest.mark.slow
def test_another_learning_rate_has_new_noise(golden: Golden) -> None:
    """What an algorithm, its parts, its loss and its net are made of is a setting, too."""
    folder = broken_off(golden, 2)
    key = checkpoint.load(folder / LAST)["noise"]["key"]
    faster = FedAvg(golden.net(), weighting="uniform")
    faster.optimizer.lr *= 1.5
    smoothed = FedAvg(golden.net(), weighting="uniform", loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1))
    for model in (faster, smoothed):
        run = resumed(golden, folder, model=model)
        assert run.aggregation.noise_key is not None and run.aggregation.noise_key.secret.hex() != key


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "a sample", "a device", "a line of code"])
def test_noise_depends_on_samples_code_and_files(
    what: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples count, not those of the fingerprint alone: a sum that may differ gets other noise."""
    monkeypatch.setattr("fl_lightning.data.module.FINGERPRINTED", 0)
    monkeypatch.syspath_prepend(tmp_path)
    head, row = "device,sec_per_sample,down_mbps,up_mbps,latency_s\n", "phone,0.1,1,1,0\n"
    code, devices = tmp_path / f"own_{what.replace(' ', '_')}.py", tmp_path / "devices.csv"
    code.write_text("from fl_lightning import FedAvg\n\n\nclass Own(FedAvg):\n    pass\n")
    devices.write_text(head + 4 * row)
    algorithm = import_module(code.stem).Own

    def options() -> dict[str, Any]:
        model = algorithm(golden.net(), weighting="uniform")
        return {"model": model, "clock": Clock(devices=str(devices), deadline_s=1e9)}

    folder = broken_off(golden, 2, **options())
    match what:
        case "a sample":
            golden.arrays[0][0][0] += 1
        case "a device":
            devices.write_text(head + 3 * row + "slow,9,1,1,0\n")
        case "a line of code":
            code.write_text(code.read_text() + "# more\n")
    key = resumed(golden, folder, **options()).aggregation.noise_key
    assert key is not None
    assert (key.secret.hex() == checkpoint.load(folder / LAST)["noise"]["key"]) == (what == "nothing")


def test_key_is_in_the_checkpoint_alone(golden: Golden) -> None:
    """No other file of the run folder has it, as bytes or as text; a run without privacy has none."""
    folder = broken_off(golden, 2, model=FedAvg(golden.net(), weighting="uniform"))
    content = checkpoint.load(folder / LAST)
    key = content["noise"]["key"]
    for file in filter(Path.is_file, folder.rglob("*")):
        present = key.encode() in file.read_bytes() or bytes.fromhex(key) in file.read_bytes()
        assert present == (file.suffix == ".ckpt"), file
    plain, _ = golden.run(FedAvg(golden.net()), max_rounds=1)
    assert checkpoint.load(plain.folder.last)["noise"] is None


# Refused


def test_statistics_of_the_clients_data_are_refused(golden: Golden, tmp_path: Path) -> None:
    """`export` and evaluation would estimate them without noise."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(192), torch.nn.Linear(192, 4))
    with pytest.raises(UserError, match=r"^model.buffers = reset: under trainer.privacy [^\n]*; set it to average or"):
        private(golden, model=FedAvg(net, weighting="uniform", buffers="reset"), sampler=UniformSampler(2))
    assert not [*tmp_path.iterdir()]


def test_checkpoints_are_no_artifacts(golden: Golden, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^trainer.loggers: WandbLogger.log_model = true: [^\n]*; set it to false$"):
        private(golden, loggers=[WandbLogger(mode="offline", log_model=True)])
    assert not [*tmp_path.iterdir()]
    run = private(golden, loggers=[WandbLogger(mode="offline")])
    kept = {file.relative_to(run.folder.path).parts for file in run.folder.path.rglob("*") if file.suffix == ".ckpt"}
    assert kept and {first for first, *_ in kept} == {"checkpoints"}
    assert [*run.folder.path.rglob("artifacts/config.yaml")]


class Public(FigureLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got = set[str]()

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.got |= {*metrics}

    def log_clients(self, name: str, values: Any, round: int) -> None:
        self.got.add(name)

    log_figure = log_clients


@pytest.mark.slow
def test_loggers_that_publish_get_what_is_protected(golden: Golden) -> None:
    """The run folder has everything; a run that a public seed makes is not private."""
    loggers = {seed: Public() for seed in (None, 1)}
    for seed, logger in loggers.items():
        privacy = GaussianPrivacy(0.5, 1.0, delta=0.1, noise_seed=seed)
        run = private(golden, privacy=privacy, loggers=[logger], callbacks=[Curves()], max_rounds=2)
        assert "client/train/loss" in metrics(run.folder.path)
    assert loggers[None].got == {"server/test/acc", "server/test/loss", "privacy/epsilon", "privacy/snr", "client/lr"}
    assert {"client/train/loss", "partition/samples", "curves"} < loggers[1].got


@pytest.mark.parametrize("kind", [GaussianPrivacy, AdaptivePrivacy])
@pytest.mark.parametrize(
    "options",
    [
        {"clip": 1e-300},
        {"clip": 1e300},
        {"noise_multiplier": 1e300},
        {"noise_multiplier": 1e-300},
        {"noise_seed": -1},
        {"delta": 0.0},
    ],
    ids=str,
)
def test_extreme_numbers_are_one_line(kind: Any, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(UserError, match=rf"^trainer.privacy.{name} = [^\n]*give a [^\n]*$"):
        kind(**{"noise_multiplier": 1.0, **options})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GaussianPrivacy, AdaptivePrivacy])
@pytest.mark.parametrize(
    "options", [{"clip": 1e-12}, {"clip": 1e12}, {"noise_multiplier": 1e6}, {"noise_multiplier": 1e-6}], ids=str
)
def test_bounds_themselves_run(kind: Any, options: dict[str, Any], golden: Golden) -> None:
    run = private(golden, privacy=kind(**{"noise_multiplier": 1.0, "delta": 0.1, **options}), max_rounds=2)
    assert run.rounds_done == 2
