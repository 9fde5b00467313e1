"""``fl-lightning init``: a folder to start from."""

import shutil
from pathlib import Path

from fl_lightning.core import ensure

SUMMARY = "Write a folder to start from: a config, an algorithm of your own, a sweep."
STARTER = Path(__file__).parent / "starter"


def run(folder: str, /) -> None:
    """Writes ``config.yaml``, ``my_algorithm.py`` and ``sweep.yaml``.

    Args:
        folder: The folder; it is created.
    """
    target, files = Path(folder), sorted(path for path in STARTER.iterdir() if path.is_file())
    ensure(not target.exists() or target.is_dir(), f"folder = {folder}: not a folder; choose another")
    for file in files:
        ensure(
            not (target / file.name).exists(), f"folder = {folder}: has a {file.name} already; choose another folder"
        )
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, target / file.name)
        print(target / file.name)
    print(f"start with: cd {folder} && fl-lightning fit --config config.yaml")
