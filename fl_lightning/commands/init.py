"""``fl-lightning init``: a folder to start from."""

import shlex
from pathlib import Path

from fl_lightning.results.terminal import say, write_new

SUMMARY = "Write a folder to start from: a config, an algorithm of your own, a sweep, a README."
STARTER = Path(__file__).parent / "starter"


def run(folder: str, /) -> None:
    """Writes ``README.md``, ``config.yaml``, ``my_algorithm.py`` and ``sweep.yaml``.

    Args:
        folder: The folder, new or empty; it is created.
    """
    write_new(folder, {file.name: file.read_text(encoding="utf-8") for file in sorted(STARTER.glob("*.*"))})
    say(f"start with: cd {shlex.quote(folder)} && fl-lightning fit --config config.yaml")
