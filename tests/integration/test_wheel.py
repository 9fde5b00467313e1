"""Wheel and sdist hold what a run needs: they are built, installed, and run outside of the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    env = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }
    process = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.long
def test_a_wheel_made_from_the_sdist_runs_by_the_names_of_configs(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="pip install build")
    pytest.importorskip("hatchling", reason="pip install hatchling")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT), cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env")
    python = str(tmp_path / "env/bin/python")
    # the dependencies are those of this environment; its editable install of the clone is not followed
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    lines = list(run(python, "-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path).split("\n"))
    site = next(path for path in lines if path.endswith("site-packages"))
    (Path(site) / "dependencies.pth").write_text(f"import sys; sys.path.append({site_packages!r})\n")

    program = str(tmp_path / "env/bin/fl-lightning")
    module = run(python, "-c", "import fl_lightning; print(fl_lightning.__file__)", cwd=tmp_path)
    assert module.startswith(str(tmp_path / "env"))
    assert "experiment/fedgloss/cifar10_alpha0.05" in run(program, "configs", cwd=tmp_path)
    run(program, "init", "mine", cwd=tmp_path)
    configs = ["--config", "quickstart", "--config", "config.yaml"]
    run(program, "fit", *configs, "--trainer.max_rounds=2", "--trainer.callbacks=[]", cwd=tmp_path / "mine")
    (folder,) = (tmp_path / "mine/runs").glob("*/version_0")
    assert (folder / "summary.json").exists()

    # what the Dockerfile copies makes the same wheel
    (tmp_path / "image").mkdir()
    for *sources, target in (
        line.split()[1:] for line in (ROOT / "Dockerfile").read_text().splitlines() if "COPY " in line
    ):
        for source in sources:
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / "image" / (target if (ROOT / source).is_dir() else source))
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", str(tmp_path / "image"), cwd=tmp_path)
    (image_wheel,) = (tmp_path / "image/dist").glob("*.whl")
    names = [{name for name in ZipFile(path).namelist() if "__pycache__" not in name} for path in (wheel, image_wheel)]
    assert names[0] == names[1] and len(names[0]) > 200
