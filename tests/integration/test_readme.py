"""README's commands, as they are written, at their length, each on what the ones before left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_RUN = {"make test": "CI runs it by itself"}
MAKE = f'make() {{ command make VENV="{sys.prefix}" -o "{sys.prefix}/.installed" "$@"; }}'
"""make, with the environment that the tests run in."""


def blocks(language: str) -> list[str]:
    """Returns README's blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def commands() -> list[str]:
    """Returns the lines of all blocks for a shell."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert [part for part in NOT_RUN if not any(line.startswith(part) for line in lines)] == []
    return [line for line in lines if not line.startswith(tuple(NOT_RUN))]


def clone(folder: Path) -> None:
    """Copies what belongs to the repository, and commits it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", folder], input=files, cwd=ROOT, check=True)
    git = "git -c user.name=test -c user.email=test@localhost"
    subprocess.run(f"git init -q && git add -A && {git} commit -qm all", shell=True, cwd=folder, check=True)


def run(lines: list[str], folder: Path) -> str:
    """Runs lines in bash, 80 columns wide; the first that fails ends it. Returns what they print."""
    env = {**os.environ, "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    script = "\n".join(["set -ex", MAKE, *lines])
    process = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.mark.slow
def test_all_commands(tmp_path: Path) -> None:
    """They run in a fresh copy of the repository, of which git sees no change afterwards; Python does as well."""
    clone(tmp_path)
    printed = run(commands(), tmp_path)
    assert "flatness: flatter" in printed, printed[-3000:]  # as README shows
    assert "round 220" in printed or "220 rounds" in printed, printed[-3000:]  # the demo's 200, and 20 more
    (python,) = blocks("python")
    run([f"python - <<'END'\n{python}END"], tmp_path)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert changed.stdout == ""
