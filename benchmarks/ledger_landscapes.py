"""docs/landscapes.png: the loss around the last models of rows of the ledger, in the same directions.

``python benchmarks/ledger_landscapes.py`` trains the rows again, to their bits on one kind of CPU, in a few minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gallery_figures import ROOT, small

from fl_lightning.results import headline
from fl_lightning.results.rows import located

ROWS, SEED = ROOT / "ledger" / "digits" / "alpha_0.05", "seed_0"
METHODS = ("FedAvg", "FedSAM", "FedGloSS", "FedGMT")


def command(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "fl_lightning", *args], check=True)


def main() -> None:
    labels, checkpoints = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in METHODS:
            (row,), run = located(ROWS / name / SEED), Path(folder) / name
            place = [f"--trainer.default_root_dir={folder}", f"--trainer.name={name}"]
            command("fit", f"--config={row / 'config.yaml'}", *place, "--trainer.callbacks=[Checkpoints]")
            checkpoints.append(run / "version_0" / "checkpoints" / "last.ckpt")
            labels.append(f"{name}, λ = {headline(row, 'flatness/lambda_max'):.2f}")
        first, *others = map(str, checkpoints)
        options = ["--samples=null", "--splits=[train]", "--same-directions", "--points=41", f"--out={folder}/drawn"]
        command("landscape", f"--ckpt_path={first}", f"--compare={others}", f"--labels={labels}", *options)
        small(Path(folder) / "drawn" / "surface.png").save(ROOT / "docs" / "landscapes.png", optimize=True)


if __name__ == "__main__":
    main()
