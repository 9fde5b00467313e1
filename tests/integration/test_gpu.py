"""The program for a GPU does everything in small on the CPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "gpu.py"))["main"]
    assert main([]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no CUDA device" in said.err


@pytest.mark.slow
@pytest.mark.parametrize("leg", ["correctness", "speed", "science"])
def test_each_leg_in_small(leg: str, tmp_path: Path) -> None:
    """To the end, and again, when nothing is left to do."""
    done = run(tmp_path, "--leg", leg, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["cpu"]
    assert found[leg] and found[f"{leg}: not reached"] == []
    assert not [name for name, value in found[leg].items() if "error" in value or value.get("ok") is False]
    again = run(tmp_path, "--leg", leg, "--device", "cpu")
    assert json.loads((tmp_path / "gpu.json").read_text())["cpu"] == found
    assert again.stdout.count("\n") == 1


@pytest.mark.slow
def test_a_leg_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    assert run(tmp_path, "--leg", "speed", "--device", "cpu", "--seconds", "0").returncode == 0
    first = json.loads((tmp_path / "gpu.json").read_text())["cpu"]
    assert first["speed"] == {} and "floors" in first["speed: not reached"]
    run(tmp_path, "--leg", "speed", "--device", "cpu", "--only", "floors")
    assert list(json.loads((tmp_path / "gpu.json").read_text())["cpu"]["speed"]) == ["floors"]
