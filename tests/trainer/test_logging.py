"""What is logged: a row a round, names, bits counted by hand, and the same in W&B and in Lightning's loggers."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fl_lightning
from fl_lightning import CSVLogger, UserError, WandbLogger
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.loggers import About
from tests.runs import cli, last, metrics, run

MEASURED = '[LambdaMax,Discrepancy,{"class_path":"Spectrum","init_args":{"k":5}},ClientLambdaMax,ClientEvaluation]'
ENDINGS = ("", "_weighted", "_std", "_worst_decile", "_worst")
D = 64 * 8 + 8 + 8 * 10 + 10  # weights of the net in tests.runs
COHORT = 3
STEPS = 7  # of a client: 216 samples, once, in minibatches of 32


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that can be measured, logged by three loggers; evaluated and measured now and then."""
    root = tmp_path_factory.mktemp("logged")
    args = (
        "--trainer.max_rounds=5 --trainer.eval_every=2 --data.val_fraction=0.1 "
        "--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.every_n_rounds=3 "
        f"--trainer.callbacks.metrics={MEASURED} "
        "--trainer.callbacks+=Checkpoints --trainer.callbacks.monitor=server/test/acc "
        "--trainer.loggers+=fl_lightning.WandbLogger --trainer.loggers.tags=[a,b] --trainer.loggers.group=g "
        f"--trainer.loggers+=lightning.pytorch.loggers.CSVLogger --trainer.loggers.save_dir={root / 'lightning'} "
        "--trainer.callbacks+=Curves"
    )
    return run("fit", *args.split(), root=root / "runs", model="SCAFFOLD")


@pytest.mark.slow
def test_a_row_a_round(logged: Path) -> None:
    with (logged / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(None not in row and None not in row.values() for row in rows)
    columns = read_metrics(logged / "metrics.csv")
    rounds = {name: [t for t, _ in values] for name, values in columns.items()}
    every, evaluated, measured = [1, 2, 3, 4, 5], [2, 4, 5], [3, 5]
    assert rounds == {
        **dict.fromkeys(("client/train/loss", "client/refused", "client/lr"), every),
        **dict.fromkeys(("client/steps", "client/passes", "time/cpu_s"), every),
        **dict.fromkeys(("comm/total_bits", "comm/transmissions"), every),
        **dict.fromkeys(("time/round_s", "time/orchestration_s", "time/clients_per_s", "time/steps_per_s"), every),
        **dict.fromkeys(("server/test/acc", "server/test/loss", "server/val/acc", "server/val/loss"), evaluated),
        **dict.fromkeys(("flatness/lambda_max", "flatness/lambda_max_residual", "flatness/discrepancy"), measured),
        **dict.fromkeys(("flatness/sharpness_global", "flatness/sharpness_local"), measured),
        **dict.fromkeys(("flatness/lambda_1", "flatness/lambda_1_residual"), measured),
        "flatness/lambda_ratio": measured,
        **dict.fromkeys(("flatness/client_lambda_max_local", "flatness/client_lambda_max_local_residual"), measured),
        **dict.fromkeys((f"server/clients/acc{end}" for end in ENDINGS), measured),
        **dict.fromkeys(("server/clients/loss", "time/flatness_s", "time/flatness_share"), measured),
    }
    flat = {name.removeprefix("flatness/"): values[0][1] for name, values in columns.items()}
    assert flat["discrepancy"] == abs(flat["sharpness_global"] - flat["sharpness_local"]) > 0
    assert all(value > 0 for _, value in columns["time/round_s"])
    for rate, count in (("time/clients_per_s", COHORT), ("time/steps_per_s", COHORT * STEPS)):
        per_round = [a * b for (_, a), (_, b) in zip(columns[rate], columns["time/round_s"], strict=True)]
        assert per_round == pytest.approx([count] * 5, rel=2e-2)  # of three digits each
    steps = [COHORT * STEPS * t for t in every]
    assert [value for _, value in columns["client/steps"]] == steps
    assert [value for _, value in columns["client/passes"]] == [2 * value for value in steps]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("model", "units", "options", "bits"),
    [
        ("FedAvg", 2, [], 32),
        ("SCAFFOLD", 4, [], 32),
        ("SCAFFOLD", 4, ["--trainer.precision=64-true"], 64),
        ("FedAvg", 2, ["--trainer.precision=bf16-mixed", "--model.ascent=SAM", "--model.averaging=SWA"], 32),
        ("FedGMT", 3, [], 32),  # down w, e; up w
        ("FedSMOO", 4, [], 32),  # w, s both ways
    ],
)
def test_bits_by_hand(model: str, units: int, options: list[str], bits: int, tmp_path: Path) -> None:
    folder = run("fit", *options, root=tmp_path, model=model)
    a_round = units * D * bits * COHORT
    assert metrics(folder)["comm/total_bits"] == [(1, a_round), (2, 2 * a_round)]
    assert metrics(folder)["comm/transmissions"] == [(1, units), (2, 2 * units)]


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a W&B file: W&B's own messages in a LevelDB log, a 7-byte header and then blocks of 32 kB.

    Nothing else in wandb's Python package reads them any more (``wandb sync`` does, but needs a server).
    """
    from wandb.proto import wandb_internal_pb2

    data, offset, content = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, offset + 4)
        if offset + 7 + size > len(data):  # W&B's own process still writes this record
            return
        content += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            yield record
            content = b""


@dataclass
class Log:
    """What an offline file of W&B holds.

    Attributes:
        run: The last record of the run itself.
        history: The logged rows; images, tables and histograms by their type.
        config: The config.
        summary: The summary, by path.
        metrics: Step metric and kept summaries, by metric.
        artifacts: Aliases and files, by type and in their order.
        exits: Exit codes.
    """

    run: Any = None
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    artifacts: list[tuple[str, list[str], list[str]]] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Log:
        """Reads the newest W&B run in a run folder; W&B's own process writes the file, and may need a moment."""
        path = max(folder.glob("wandb/offline-run-*"), key=lambda run: run.name)
        for _ in range(100):
            log = cls()
            log.add(path)
            if log.exits:
                break
            time.sleep(0.1)
        return log

    def add(self, path: Path) -> None:
        (file,) = path.glob("run-*.wandb")
        for record in wandb_records(file):
            match record.WhichOneof("record_type"):
                case "history":
                    items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                    kinds = {key[: -len("/_type")]: value for key, value in items.items() if key.endswith("/_type")}
                    kinds |= {k: v["_type"] for k, v in items.items() if isinstance(v, dict) and "_type" in v}
                    plain = {k: v for k, v in items.items() if not k.startswith("_") and isinstance(v, (int, float))}
                    self.history.append({k: v for k, v in plain.items() if k.rpartition("/")[0] not in kinds} | kinds)
                case "config":
                    self.config |= {item.key: json.loads(item.value_json) for item in record.config.update}
                case "summary":
                    for item in record.summary.update:
                        self.summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                case "run":
                    self.run = record.run
                case "metric":
                    kept = {name for name in ("min", "max", "last") if getattr(record.metric.summary, name)}
                    self.metrics[record.metric.name or record.metric.glob_name] = (record.metric.step_metric, kept)
                case "artifact":
                    files = sorted(entry.path for entry in record.artifact.manifest.contents)
                    self.artifacts.append((record.artifact.type, sorted(record.artifact.aliases), files))
                case "exit":
                    self.exits.append(record.exit.exit_code)


@pytest.mark.slow
def test_wandb_holds_the_same(logged: Path) -> None:
    log, columns = Log.read(logged), read_metrics(logged / "metrics.csv")
    first, *history, figure = log.history
    assert first == {
        "round": 0, "partition/heat_map": "image-file",
        "partition/samples_clients": "histogram", "partition/classes_clients": "histogram",
    }  # fmt: skip
    assert figure == {"round": 5, "curves": "image-file", "clients": "image-file"}
    assert [row["round"] for row in history] == [1, 2, 3, 4, 5]
    for name, values in columns.items():
        assert [(row["round"], row[name]) for row in history if name in row] == values
    shown = {name: [r["round"] for r in history if name in r] for row in history for name in row if row[name] in KINDS}
    assert shown == {
        "client/train/loss_clients": [2, 4, 5], "flatness/spectrum": [3, 5],
        "flatness/client_lambda_max_local_clients": [3, 5], "server/clients/acc_clients": [3, 5],
    }  # fmt: skip
    saved = yaml.safe_load((logged / "config.yaml").read_text())
    assert saved.keys() >= {"model", "data", "trainer"}
    assert {key: log.config[key] for key in saved} == saved
    assert (
        log.run.project == "fl_lightning"
        and log.run.run_group == "g"
        and list(log.run.tags) == ["SCAFFOLD", "Digits", "a", "b"]
    )
    assert log.run.display_name == "SCAFFOLD-Digits/version_0" and log.run.job_type == "fit"
    assert log.exits == [0]


KINDS = ("histogram", "table-file", "image-file")


def test_wandb_knows_the_best_values_and_the_headline(logged: Path) -> None:
    """The direction of each metric decides; the headline is that of summary.json, and a metric of every evaluation."""
    log, columns = Log.read(logged), read_metrics(logged / "metrics.csv")
    assert log.metrics["*"] == ("round", set())
    assert log.metrics["server/test/acc"] == ("round", {"max", "last"})
    for name in ("server/test/loss", "flatness/lambda_max", "client/train/loss"):
        assert log.metrics[name] == ("round", {"min", "last"})
        assert log.summary[name] == {"min": min(v for _, v in columns[name]), "last": columns[name][-1][1]}
    accuracy = [value for _, value in columns["server/test/acc"]]
    assert log.summary["server/test/acc"] == {"max": max(accuracy), "last": accuracy[-1]}
    headline = [row["server/test/acc_headline"] for row in log.history if "server/test/acc_headline" in row]
    assert headline == pytest.approx(accuracy)  # of 2, 4 and 5 rounds, the last one counts
    assert headline[-1] == pytest.approx(json.loads((logged / "summary.json").read_text())["mean"])


def test_wandb_keeps_config_and_checkpoints(logged: Path) -> None:
    """They lie as in the run folder, so that a downloaded artifact is one."""
    artifacts = [artifact for artifact in Log.read(logged).artifacts if artifact[0] in ("config", "model")]
    assert artifacts == [
        ("config", ["last", "latest"], ["config.yaml"]),
        ("model", ["best", "latest"], ["checkpoints/best.ckpt", "config.yaml"]),
        ("model", ["last", "latest"], ["checkpoints/last.ckpt", "config.yaml"]),
    ]
    (kept,) = logged.glob("wandb/offline-run-*/artifacts/checkpoints/last.ckpt")
    assert kept.samefile(logged / "checkpoints" / "last.ckpt")  # no second copy


@pytest.mark.slow
def test_wandb_run_goes_on_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumption keeps the best value of the whole run; group and tags have defaults; the console shows nothing."""
    args = ["--trainer.loggers+=fl_lightning.WandbLogger", "--trainer.eval_every=1"]
    folder = run("fit", *args, root=tmp_path)
    first = Log.read(folder)
    again = run("fit", *args, "--trainer.max_rounds=4", "--model.optimizer.lr=1e-9", "--ckpt_path=last", root=tmp_path)
    assert again == folder
    second, accuracy = Log.read(folder), read_metrics(folder / "metrics.csv")["server/test/acc"]
    assert second.run.run_id == first.run.run_id and [row["round"] for row in second.history] == [3, 4]
    assert second.summary["server/test/acc"] == {"max": max(v for _, v in accuracy), "last": accuracy[-1][1]}
    assert second.history[-1]["server/test/acc_headline"] == pytest.approx(accuracy[-1][1])
    assert list(first.run.tags) == ["FedAvg", "Digits"] and first.run.run_group.startswith("FedAvg-Digits-")
    reseeded = run("fit", *args, "--trainer.seed=1", root=tmp_path / "seed")
    assert Log.read(reseeded).run.run_group == first.run.run_group != second.run.run_group  # another learning rate

    measured = '--metrics=[{"class_path":"Spectrum","init_args":{"k":2,"samples":50}}]'
    cli("flatness", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", measured)
    log = Log.read(folder)
    assert log.run.run_id == first.run.run_id and log.run.run_group == second.run.run_group
    assert log.run.job_type == "fit" and list(log.run.tags) == list(second.run.tags)
    assert log.history == [{"round": 4, "flatness/spectrum": "image-file"}] and not log.artifacts and log.exits == [0]
    cli("landscape", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", "--points=3", "--samples=50")
    assert Log.read(folder).history == [
        {"round": 4, "landscape/surface": "image-file", "landscape/surface_3d": "image-file"}
    ]
    shown = capsys.readouterr()
    assert "wandb:" not in shown.out and shown.err == ""


def test_the_mode_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert WandbLogger().mode == "offline" and WandbLogger().project == "fl_lightning"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "online")
    assert WandbLogger().mode == "online" and WandbLogger(mode="disabled").mode == "disabled"
    assert WandbLogger().project == "mine" and WandbLogger(project="p").project == "p"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = run("fit", "--trainer.loggers+=fl_lightning.WandbLogger", root=tmp_path)
    assert not (folder / "wandb").exists() and last(folder)["round"] == 2


def test_a_run_without_wandb_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, and a mode that is asked for is refused."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.warns(match="wandb is not installed"):
        folder = run("fit", "--trainer.loggers=[CSVLogger,WandbLogger]", root=tmp_path)
    assert len(metrics(folder)["server/test/acc"]) == 2 and not (folder / "wandb").exists()
    with pytest.raises(SystemExit, match=r"^error: .*WandbLogger\.mode = offline: wandb is missing"):
        run("fit", "--trainer.loggers=WandbLogger", "--trainer.loggers.mode=offline", root=tmp_path)


@pytest.mark.long
def test_the_quickstart_where_wandb_is_not_installed(tmp_path: Path) -> None:
    """The process finds all packages but wandb, and, beside its runs, the folder of those of W&B."""
    site = tmp_path / "site"
    site.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if not package.name.startswith("wandb"):
            (site / package.name).symlink_to(package)
    (tmp_path / "wandb").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fl_lightning.__file__).parents[1]), str(site)])}
    command = [sys.executable, "-S", "-m", "fl_lightning", "fit", "--config", "quickstart", "--trainer.max_rounds", "1"]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and "wandb is not installed" in process.stderr, process.stderr
    assert len(metrics(tmp_path / "runs/FedGloSS-Digits/version_0")["server/test/acc"]) == 1


def test_loggers_of_lightning_work_beside_ours(logged: Path) -> None:
    (path,) = (logged.parents[2] / "lightning").rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    for name, values in read_metrics(logged / "metrics.csv").items():
        theirs = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert theirs == pytest.approx(dict(values)), name


def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    log, target = CSVLogger(), tmp_path / "other"
    log.start(tmp_path, {}, 0, About("fit", "", (), 1))
    log.log_metrics({"a": 1.0}, 1)
    target.write_text("mine")
    log.path.unlink()
    log.path.symlink_to(target)
    with pytest.raises(UserError, match=r"metrics\.csv: cannot be written"):
        log.log_metrics({"a": 2.0}, 2)
    assert target.read_text() == "mine"
