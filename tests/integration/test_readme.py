"""README's first commands, as they are written, at their length, each on what the ones before left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
FIRST = ("fl-lightning test", "fl-lightning fit --config $RUN", "fl-lightning flatness")
"""Of a flat, trained model: its Hessian is nearly zero, and float32's rounding as large as its products."""


def commands() -> list[str]:
    """All lines of README that call the package, with the lines that they need."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_first_commands(tmp_path: Path) -> None:
    """The demo, a test, 20 rounds more, and flatness."""
    setting, *_ = [line for line in commands() if line.startswith("RUN=")]
    lines = [line for start in FIRST for line in commands() if line.startswith(start)]
    assert len(lines) == len(FIRST)
    demo = (README.parent / "Makefile").read_text().partition("demo: venv")[2].splitlines()[1]
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fl-lightning").symlink_to(Path(sys.executable).with_name("fl-lightning"))
    script = "\n".join(["set -e", demo.strip().replace("$(BIN)/", ""), setting, *lines])
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "round 220" in done.stdout or "220 rounds" in done.stdout, done.stdout[-3000:]
