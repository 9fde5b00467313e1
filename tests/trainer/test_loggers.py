"""TensorBoard gets what metrics.csv has, by its own reader, and goes on when a run is resumed; loggers of Lightning."""

from __future__ import annotations

import csv
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fl_lightning import CSVLogger, FederatedTrainer, TensorBoardLogger, UserError
from fl_lightning.results.configs import flatten
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.loggers import About, base, programs
from tests.runs import last, run

ABOUT = About("fit", "group", ("FedAvg", "Digits"), 1)


@dataclass
class Held:
    """What a logger's own files hold.

    Attributes:
        metrics: Round and value, by name.
        settings: The settings.
        pictures: Names of pictures.
        clients: Names of histograms.
    """

    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    pictures: set[str] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)

    def add(self, name: str, round: int, value: float) -> None:
        self.metrics.setdefault(name, []).append((round, value))


def of_tensorboard(folder: Path) -> Held:
    """The files of events, in their order; a start at a round makes TensorBoard forget it and what follows."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    held = Held()
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (size,) = struct.unpack_from("<Q", data, offset)
            event = Event.FromString(data[offset + 12 : offset + 12 + size])
            offset += size + 16
            if event.session_log.status == SessionLog.START:
                held.metrics = {n: [v for v in values if v[0] < event.step] for n, values in held.metrics.items()}
            for value in event.summary.value:
                content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                for name, setting in content.session_start_info.hparams.items():
                    held.settings[name] = getattr(setting, setting.WhichOneof("kind"))
                match value.WhichOneof("value"):
                    case "image":
                        held.pictures.add(value.tag)
                    case "histo":
                        held.clients.add(value.tag)
                    case "simple_value":
                        held.add(value.tag, event.step, value.simple_value)
    return held


@pytest.mark.slow
def test_tensorboard_holds_what_the_csv_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its short name is given; the resumed run goes on in the same place. Nothing is left in the working folder."""
    args = ["--trainer.loggers=tensorboard", "--trainer.callbacks+=Curves"]
    args += ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.metrics=[ClientEvaluation]"]
    before = {*Path().iterdir()}
    folder = run("fit", *args, root=tmp_path)
    assert run("fit", *args, "--trainer.max_rounds=4", "--ckpt_path=last", root=tmp_path) == folder
    held, columns = of_tensorboard(folder), read_metrics(folder / "metrics.csv")
    assert held.metrics.keys() >= columns.keys()
    for name, values in columns.items():
        pairs = sorted(held.metrics[name])
        assert len(pairs) == len(values) and dict(pairs) == pytest.approx(dict(values), rel=1e-6), name
    assert [round for round, _ in columns["server/test/acc"]] == [1, 2, 3, 4]
    settings = flatten(last(folder)["config"])
    assert held.settings["model"] == settings["model"] and float(held.settings["data.batch_size"]) == 32
    assert held.settings.keys() >= settings.keys()
    assert held.pictures >= {"partition/heat_map", "curves"}
    assert held.clients >= {"partition/samples_clients", "server/clients/acc_clients"}
    assert {*Path().iterdir()} == before and len(capsys.readouterr().out.splitlines()) == 4  # of the package


def test_rounds_after_the_checkpoint_are_logged_once(tmp_path: Path) -> None:
    """A process that is killed after round 4 has saved round 2."""
    first = TensorBoardLogger()
    first.start(tmp_path, {}, 0, ABOUT)
    for round in range(1, 5):
        first.log_metrics({"time/round_s": round / 4}, round)
    first.finalize("failed")
    second = TensorBoardLogger()
    second.start(tmp_path, {}, 2, ABOUT)
    for round in range(3, 7):
        second.log_metrics({"time/round_s": round / 4}, round)
    second.finalize("success")
    assert sorted(of_tensorboard(tmp_path).metrics["time/round_s"]) == [(round, round / 4) for round in range(1, 7)]


def test_a_logger_of_lightning_gets_metrics_and_settings(tmp_path: Path) -> None:
    """It is given by its path, as MLflow's, Comet's and Neptune's are."""
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(tmp_path), "name": "own"},
    }
    folder = run("fit", f"--trainer.loggers=[{json.dumps(logger)}]", root=tmp_path / "runs")
    with (tmp_path / "own/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = read_metrics(folder / "metrics.csv")["client/train/loss"]
    assert [(int(row["step"]), float(row["client/train/loss"])) for row in rows] == expected
    settings = yaml.safe_load((tmp_path / "own/version_0/hparams.yaml").read_text())
    assert settings["data"] == yaml.safe_load((folder / "config.yaml").read_text())["data"]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    """TensorBoard itself finds one run, with each round once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    test_rounds_after_the_checkpoint_are_logged_once(tmp_path / "runs" / "version_0")
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "runs")).Reload()
    assert [*multiplexer.Runs()] == ["version_0"]
    events = multiplexer.Tensors("version_0", "time/round_s")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^trainer.loggers = TensorBoardLogger: needs tensorboard; pip install tensorboard$"
    ):
        TensorBoardLogger()


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_pixels_of_a_file(name: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((3, 2, 3), 128, np.uint8)).save(tmp_path / name)
    assert base.pixels(tmp_path / name).tolist() == [[[128, 128, 128, 255]] * 2] * 3


def test_a_column_that_comes_later_keeps_the_others(tmp_path: Path) -> None:
    """It does, whatever their names are."""
    logger = CSVLogger()
    logger.start(tmp_path, {}, 0, ABOUT)
    for step, names in enumerate((["@1"], ["@1", "-x"], ["=y"]), 1):
        logger.log_metrics({name: float(step) for name in names}, step)
    assert read_metrics(tmp_path / "metrics.csv") == {"@1": [(1, 1), (2, 2)], "-x": [(2, 2)], "=y": [(3, 3)]}


def test_one_logger_and_the_csv_that_is_there_already(tmp_path: Path) -> None:
    """A single logger needs no list; a second log of metrics.csv is the first one."""
    assert [type(logger) for logger in FederatedTrainer(loggers=CSVLogger()).loggers] == [CSVLogger]
    folder = run("fit", "--trainer.loggers=csv", "--trainer.loggers+=CSVLogger", root=tmp_path)
    assert [round for round, _ in read_metrics(folder / "metrics.csv")["client/lr"]] == [1, 2]
