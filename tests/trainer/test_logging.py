"""What is logged: a row a round, names, bits counted by hand, and the same in W&B and in Lightning's loggers."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.results.metrics import read_metrics
from tests.runs import metrics, run

D = 64 * 8 + 8 + 8 * 10 + 10  # weights of the net in tests.runs
COHORT = 3


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that can be measured, logged by three loggers; evaluated and measured now and then."""
    root = tmp_path_factory.mktemp("logged")
    args = (
        "--trainer.max_rounds=5 --trainer.eval_every=2 --data.val_fraction=0.1 "
        "--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.every_n_rounds=3 "
        "--trainer.loggers+=fl_lightning.WandbLogger --trainer.loggers.tags=[a,b] --trainer.loggers.group=g "
        f"--trainer.loggers+=lightning.pytorch.loggers.CSVLogger --trainer.loggers.save_dir={root / 'lightning'} "
        "--trainer.callbacks+=Curves"
    )
    return run("fit", *args.split(), root=root / "runs", model="SCAFFOLD")


def test_a_row_a_round(logged: Path) -> None:
    with (logged / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(None not in row and None not in row.values() for row in rows)
    columns = read_metrics(logged / "metrics.csv")
    rounds = {name: [at for at, _ in values] for name, values in columns.items()}
    every, evaluated, measured = [1, 2, 3, 4, 5], [2, 4, 5], [3, 5]
    assert rounds == {
        **dict.fromkeys(("client/train/loss", "client/refused", "client/lr"), every),
        **dict.fromkeys(("comm/total_bits", "comm/transmissions"), every),
        **dict.fromkeys(("time/round_s", "time/orchestration_s", "time/clients_per_s"), every),
        **dict.fromkeys(("server/test/acc", "server/test/loss", "server/val/acc", "server/val/loss"), evaluated),
        **dict.fromkeys(("flatness/lambda_max", "flatness/lambda_max_residual", "flatness/discrepancy"), measured),
        **dict.fromkeys(("flatness/sharpness_global", "flatness/sharpness_local"), measured),
        **dict.fromkeys(("time/flatness_s", "time/flatness_share"), measured),
    }
    flat = {name.removeprefix("flatness/"): values[0][1] for name, values in columns.items()}
    assert flat["discrepancy"] == abs(flat["sharpness_global"] - flat["sharpness_local"]) > 0
    assert all(value > 0 for name in ("time/round_s", "time/clients_per_s") for _, value in columns[name])


@pytest.mark.parametrize(
    ("model", "units", "more", "bits"),
    [
        ("FedAvg", 2, [], 32),
        ("SCAFFOLD", 4, [], 32),
        ("SCAFFOLD", 4, ["--trainer.precision=64-true"], 64),
        ("FedAvg", 2, ["--trainer.precision=bf16-mixed", "--model.ascent=SAM", "--model.averaging=SWA"], 32),
        ("FedGMT", 3, [], 32),  # down w, e; up w
        ("FedSMOO", 4, [], 32),  # w, s both ways
    ],
)
def test_bits_by_hand(model: str, units: int, more: list[str], bits: int, tmp_path: Path) -> None:
    folder = run("fit", *more, root=tmp_path, model=model)
    a_round = units * D * bits * COHORT
    assert metrics(folder)["comm/total_bits"] == [(1, a_round), (2, 2 * a_round)]
    assert metrics(folder)["comm/transmissions"] == [(1, units), (2, 2 * units)]


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a W&B file: W&B's own messages in a LevelDB log, a 7-byte header and then blocks of 32 kB.

    Nothing else in wandb's Python package reads them any more (``wandb sync`` does, but needs a server).
    """
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_holds_the_same(logged: Path) -> None:
    (path,) = logged.glob("wandb/offline-run-*/run-*.wandb")
    history, config, runs, steps, exits = [], {}, [], set(), []
    for record in wandb_records(path):
        match record.WhichOneof("record_type"):
            case "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                history.append({key: value for key, value in items.items() if not key.startswith("_")})
            case "config":
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            case "run":
                runs.append(record.run)
            case "metric":
                steps.add((record.metric.name or record.metric.glob_name, record.metric.step_metric))
            case "exit":
                exits.append(record.exit.exit_code)
    *history, figure = history
    assert figure["round"] == 5 and figure["curves/_type"] == "image-file"
    assert [row["round"] for row in history] == [1, 2, 3, 4, 5]
    for name, values in read_metrics(logged / "metrics.csv").items():
        assert [(row["round"], row[name]) for row in history if name in row] == values
    saved = yaml.safe_load((logged / "config.yaml").read_text())
    assert saved.keys() >= {"model", "data", "trainer"}
    assert {key: config[key] for key in saved} == saved
    assert ("*", "round") in steps
    assert runs[0].project == "fl_lightning" and runs[0].run_group == "g" and list(runs[0].tags) == ["a", "b"]
    assert runs[0].display_name == "SCAFFOLD-Digits/version_0"
    assert exits == [0]


def test_loggers_of_lightning_work_beside_ours(logged: Path) -> None:
    (path,) = (logged.parents[2] / "lightning").rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    for name, values in read_metrics(logged / "metrics.csv").items():
        theirs = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert theirs == pytest.approx(dict(values)), name
