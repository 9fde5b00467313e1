"""The program for a GPU does everything in small on the CPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATHS = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
"""Of processes."""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The program in this process, in a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(BENCHMARKS / "gpu.py"))["main"]  # type: ignore[no-any-return]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no CUDA device" in said.err


@pytest.mark.slow
@pytest.mark.parametrize("leg", ["correctness", "speed", "science"])
def test_each_leg_in_small(
    leg: str, main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the end, and again, when nothing is left to do."""
    args = ["--leg", leg, "--device", "cpu"]
    assert main(args) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "gpu.json").read_text())["cpu"]
    assert found[leg] and found[f"{leg}: not reached"] == []
    assert not [name for name, value in found[leg].items() if "error" in value or value.get("ok") is False]
    capsys.readouterr()
    assert main(args) == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["cpu"] == found
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.slow
def test_a_leg_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    assert run(tmp_path, "--leg", "speed", "--device", "cpu", "--seconds", "0").returncode == 0
    first = json.loads((tmp_path / "gpu.json").read_text())["cpu"]
    assert first["speed"] == {} and "floors" in first["speed: not reached"]
    run(tmp_path, "--leg", "speed", "--device", "cpu", "--only", "floors")
    assert list(json.loads((tmp_path / "gpu.json").read_text())["cpu"]["speed"]) == ["floors"]
