"""The program for a GPU does everything in small on the CPU, killed and continued; its report has what it found."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import join, main
from benchmarks.legs.correctness import verdict
from benchmarks.legs.items import Leg, Results, Task, fill, machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = "# Title\n\n<!-- gpu -->\nNothing yet.\n<!-- /gpu -->\n\nThe end.\n"
MACHINE = {"kind": "cuda", "device": "A GPU", "torch": "2.15", "cuda": "13", "python": "3.12"}
STRANGE = """
import ctypes, os, signal, subprocess, time

def crash(): ctypes.string_at(0)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def hang(): subprocess.run(["sleep", "1000"])
def fail(): raise ValueError("of no use\\nat all")
def good(): return {"ok": True, "threads": os.environ["OMP_NUM_THREADS"]}
def wrong(): return {"ok": False}
def strange(): return {"ok": open}

def items(task):
    return {f.__name__: f for f in (crash, killed, hang, fail, good, wrong, strange)} | {"last": good}
"""


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *args]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *args: str) -> str:
    process = start(folder, *args)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, output + errors
    return output


def results(folder: Path) -> dict[str, Any]:
    """Returns what the program has measured on this machine, the only one in its file."""
    (legs,) = json.loads((folder / "runs/gpu/gpu.json").read_text()).values()
    return dict(legs)


def processes_in(folder: Path) -> dict[int, str]:
    """Returns the commands of the processes that work in a folder."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").resolve() == folder:
                commands[int(path.name)] = (path / "cmdline").read_text()  # empty if it has ended
    return {number: command for number, command in commands.items() if command}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correctness=1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "no CUDA device" in captured.err


def test_report_puts_the_tables_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has ratios, floors, the papers' numbers, errors and what was not reached; and no empty table."""
    page, out = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(PAGE)
    assert main(["--out", str(out), "--report", str(page)]) == 1
    assert "nothing to report" in capsys.readouterr().err and page.read_text() == PAGE
    work = {"work": "W1", "method": "FedAvg", "form": "float32", "seeds": 1, "cohort": 5, "steps": 8}
    rates = {"round_s": 0.1, "steps_per_s": 400.0, "clients_per_s": 50.0}
    graphed = {"round_s": 0.01, "steps_per_s": 4000.0, "clients_per_s": 500.0, "first_s": 2.0, "peak_gb": 1.5}
    run = {"whole": True, "rounds": 3000, "accuracy": 0.48, "deviation": 0.01, "flatness/lambda_max": 70.0}
    cut = {"whole": False, "rounds": 2007, "accuracy_of_last_evaluations": 0.45, "rounds_of_last_evaluations": [2000]}
    legs = {
        "machine": MACHINE,
        "correctness": {
            "FedAvg, sequential": {"ok": True, "difference": 1e-12},
            "FedAvg, graphed": {"ok": False, "difference": 0.5},
            "FedSAM, graphed": {"error": "RuntimeError: illegal access"},
            "resume, graphed": {"ok": False, "repeated": True, "on disk": False},
        },
        "correctness: not reached": ["FedSAM, graphed", "MOON, compiled"],
        "speed": {
            "floors": {"launches_per_s": 1e5, "graphed_launches_per_s": 1e6, "float32_flops": 1e12},
            "a": {**work, "who": "plain loop", **rates, "step_operations": 100, "step_flops": 10**8},
            "b": {**work, "who": "graphed", **graphed},
            "c": {**work, "method": "FedSAM", "who": "graphed", **graphed},
            "d": {**work, "who": "batched", **graphed},
        },
        "speed: not reached": [],
        "science": {"FedSAM": cut, "FedAvg": {**run, "engine": "graphed", "seconds a round": 0.012}},
        "science: not reached": ["FedSAM", "FedGMT"],
    }
    out.write_text(json.dumps({"A GPU": legs}))
    assert main(["--out", str(out), "--report", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- gpu -->\n\n## Measured: A GPU") and text.endswith(
        "<!-- /gpu -->\n\nThe end.\n"
    )
    assert "| sequential | 1 | 1 | 1.0e-12 |  |" in text
    assert "| graphed | 3 | 0 |  | **FedAvg** (5.0e-01), **FedSAM**, **resume** (on disk) |" in text
    assert "RuntimeError: illegal access" in text
    # 8 * 5 * 1e8 FLOPs at 1e12 are 0.004 of 0.01 s
    assert "| W1, FedAvg | graphed | float32 | 5 | 10 | 100 | 10.00 | 40% | 1.50 |" in text
    assert "| FedAvg | 3000 | 48.00 ± 1.00 | 48.60 ± 5.01 | 70 | 148 |" in text
    assert "| FedSAM | 2007, cut off | 45.00 (1, rounds 2000 to 2000) |" in text
    rows = [
        "### Correctness",
        "### Speed",
        "| W1, FedAvg | graphed",
        "| W1, FedAvg | batched",
        "| W1, FedSAM | graphed",
    ]
    positions = [text.index(row) for row in (*rows, "### Science", "| FedAvg | 3000", "| FedSAM | 2007")]
    assert positions == sorted(positions)  # each leg in its order, whichever item ended first
    assert "MOON, compiled" in text and "Not reached: FedSAM, FedGMT" in text


def test_verdict_of_a_nan_is_no() -> None:
    outcome = verdict([0.0, float("nan"), 0.0], 1.0)
    assert not outcome["ok"] and outcome["difference"] != outcome["difference"]
    assert verdict([0.1, 0.2], 1.0) == {"ok": True, "difference": 0.2}


@pytest.mark.long
def test_an_item_that_crashes_hangs_or_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gpu.json"
    results = Results(path, "strange")
    fill(results, Task("strange", "cpu", time.monotonic() + 100, path, []), Leg(2, 30.0))
    ((_, legs),) = json.loads(path.read_text()).items()
    items = legs["strange"]
    assert "SIGSEGV" in items["crash"]["error"] and "ended after its time" in items["hang"]["error"]
    assert items["fail"]["error"] == "ValueError: of no use"
    assert items["good"]["ok"] and items["last"]["ok"] and items["good"]["threads"] == "2"
    assert "SIGKILL" in items["killed"]["error"]
    assert results.failed == ["crash", "killed", "hang", "fail", "wrong", "strange"]
    log = path.with_suffix(".log").read_text()
    assert "not JSON serializable" in items["strange"]["error"]
    assert log.count("\n== ") + 1 == 4 and "in crash" in log and "in hang" in log and "in fail" in log
    assert not [command for command in processes_in(tmp_path).values() if "spawn_main" in command or "sleep" in command]
    cpu = machine("cpu")
    assert Results(path, "strange").begin(cpu, ["crash", "good", "new"]) == ["new", "crash"]
    assert Results(path, "strange").begin(cpu, ["crash", "good", "new"], "new") == ["new"]
    assert Results(path, "strange").begin(MACHINE, ["good"]) == ["good"]  # another machine
    one, other = json.loads(path.read_text()).values()
    assert one["strange: not reached"] == ["crash", "new"] and other["strange: not reached"] == ["good"]


def test_results_of_a_loan_join_those_that_are_there(tmp_path: Path) -> None:
    old = {"A": {"speed": {"a": {}, "b": {"x": 2}}, "speed: not reached": ["c"]}}
    new = {"A": {"speed": {"b": {"x": 3}}, "speed: not reached": []}, "B": {"speed": {}}}
    for name, content in (("old.json", old), ("new.json", new)):
        (tmp_path / name).write_text(json.dumps(content))
    for out in ("old.json", "none.json"):
        join(tmp_path / "new.json", tmp_path / out)
    both = {"A": {"speed": {"a": {}, "b": {"x": 3}}, "speed: not reached": []}, "B": {"speed": {}}}
    assert json.loads((tmp_path / "old.json").read_text()) == both
    assert json.loads((tmp_path / "none.json").read_text()) == new
    later = {"A": {"speed": {"d": {}, "a": {"whole": False}}, "speed: not reached": ["a", "c"]}}
    (tmp_path / "later.json").write_text(json.dumps(later))
    join(tmp_path / "later.json", tmp_path / "old.json")
    legs = json.loads((tmp_path / "old.json").read_text())["A"]
    assert legs["speed: not reached"] == ["c"] and legs["speed"]["a"] == {}  # a was, before


@pytest.mark.long
def test_correctness_in_small_killed_after_an_item_and_continued(tmp_path: Path) -> None:
    process = start(tmp_path, "correctness=600")
    process.stdout.readline()
    kill(process, tmp_path)
    first = results(tmp_path)
    assert first["correctness"] and first["correctness: not reached"]
    run(tmp_path, "correctness=600")
    items = whole(tmp_path, "correctness")
    assert first["correctness"].items() <= items.items()  # not done again


@pytest.mark.long
def test_speed_in_small_with_its_report(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    run(tmp_path, "speed=600", "--report", "page.md")
    whole(tmp_path, "speed")
    assert "| W3-MLP, FedAvg, 2 seeds | graphed | float32 | 3 |" in (tmp_path / "page.md").read_text()


LIMIT, DATA = 62.0, 55.5
"""MiB that travel to a machine that is lent, and those of CIFAR-10, its split and three wheels."""


def test_what_travels_to_a_lent_machine_is_small() -> None:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True)
    excluded = ("ledger/", "docs/", "tests/", "notebooks/")
    assert all(f"'!/{name}'" in (BENCHMARKS / "gpu.sh").read_text() for name in excluded)
    files = [BENCHMARKS.parent / name for name in git.stdout.split("\0") if name and not name.startswith(excluded)]
    assert sum(path.stat().st_size for path in files if path.exists()) / 2**20 + DATA < LIMIT


def lent(folder: Path) -> dict[str, str]:
    """Makes what pack brings: CIFAR-10's decoder, which writes nothing, and one wheel; returns the environment."""
    bundle = folder / ".gpu"
    bundle.mkdir()
    (bundle / "limits").write_text("90 90 90\n")
    (bundle / "commit").write_text("abc\n")
    (bundle / "cifar10_npz.py").touch()
    with zipfile.ZipFile(bundle / "brought-1-py3-none-any.whl", "w") as wheel:
        for name, text in {
            "METADATA": "Name: brought\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"brought-1.dist-info/{name}", text)
        wheel.writestr("brought.py", "")
    for name in ("benchmarks", "contest", "fl_lightning", "configs", "ledger"):
        (folder / name).symlink_to(BENCHMARKS.parent / name)
    variables = {"DEVICE": "cpu", "PYTHON": sys.executable, "OUT": str(folder / "out"), "WORK": str(folder / "work")}
    return {**os.environ, **variables}


@pytest.mark.long
@pytest.mark.parametrize("verb", ["check", "measure"])
def test_a_lent_machine_in_small(verb: str, tmp_path: Path) -> None:
    env, out = lent(tmp_path), tmp_path / "out"
    command = ["bash", str(BENCHMARKS / "gpu.sh"), verb, "--only", "^FedAvg(, sequential)?$|^floors"]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    (legs,) = json.loads((out / "gpu.json").read_text()).values()
    items = [
        item for leg in (["correctness"] if verb == "check" else ["speed", "science"]) for item in legs[leg].values()
    ]
    assert items and all(item["commit"] == "abc" for item in items)
    assert "torch" in (out / "machine.txt").read_text() and (tmp_path / "work/site/brought.py").exists()
    if verb == "measure":
        with tarfile.open(out / "runs.tgz") as runs:
            names = runs.getnames()
        assert any(name.endswith("metrics.csv") for name in names) and not any("checkpoints" in name for name in names)


@pytest.mark.long
def test_a_lent_machine_is_killed_at_any_moment(tmp_path: Path) -> None:
    """Whatever was said to have ended comes home, no process is left, and no item is done again."""
    env, lines, chance = lent(tmp_path), list[str](), random.Random(42)
    (tmp_path / ".gpu/limits").write_text("600 600 600\n")
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "check", "--only", "^FedAvg"]
    for last in (False, False, False, True):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if not last:
            lines += [process.stdout.readline() for _ in range(chance.randrange(2))]
            time.sleep(3 * chance.random())
            pids = [pid for pid, command in processes_in(tmp_path).items() if "benchmarks.gpu" in command]
            assert all(os.getpgid(pid) == process.pid for pid in pids)  # so that it does not write on
            os.killpg(process.pid, signal.SIGKILL)
        lines += process.communicate(timeout=300 if last else 30)[0].splitlines()
        while processes_in(tmp_path):
            time.sleep(0.02)
        names = [line.partition(": ")[0] for line in lines if line.startswith("FedAvg")]
        if (path := tmp_path / "out/gpu.json").exists():
            join(path, tmp_path / "home.json")
            (home,) = json.loads((tmp_path / "home.json").read_text()).values()
            assert {*names} <= {*home["correctness"]}
    assert process.returncode == 0 and len({*names}) == len(names)
    assert len(home["correctness"]) == 3 and all(item["ok"] for item in home["correctness"].values())


def kill(process: subprocess.Popen[str], folder: Path) -> None:
    """Kills the program, and waits until its other processes have ended with it."""
    process.kill()
    process.communicate(timeout=600)
    assert process.returncode < 0
    while processes_in(folder):
        time.sleep(0.02)


def whole(folder: Path, leg: str) -> dict[str, Any]:
    """Returns the results of a leg, which has done everything without an error."""
    legs = results(folder)
    assert legs[leg] and legs[f"{leg}: not reached"] == []
    assert not [name for name, value in legs[leg].items() if "error" in value or value.get("ok") is False]
    return dict(legs[leg])
