"""The pictures of docs/gallery.md, by the commands of that page.

``python benchmarks/gallery_figures.py`` runs them, which takes a few minutes on one core, and keeps what they draw.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
DRAWN = {
    "curves": "comparison/curves.png",
    "division": "division/heatmap.png",
    "clients": "served/clients.png",
    "surface": "surface/surface.png",
    "plane": "plane/plane.png",
    "perturbation": "perturbation/perturbation.png",
    "interpolate": "line/interpolate.png",
    "trajectory": "trajectory/trajectory.png",
}
"""What a command of the page writes, by the name of the picture."""


def small(picture: Path, scale: float = 0.54, colours: int = 64) -> Image.Image:
    """A picture at the size of a page, with a small palette.

    Args:
        picture: The file, with 300 pixels an inch.
        scale: What its size is multiplied by: a figure of a paper's full width then has 1,100 pixels.
        colours: Colours of the palette.
    """
    image = Image.open(picture).convert("RGB")
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS).quantize(
        colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )


def main() -> None:
    commands = "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "configs").symlink_to(ROOT / "configs")
        run = 'fl-lightning() { python -m fl_lightning "$@"; }\nset -e\n'
        env = {**os.environ, "WANDB_MODE": "offline"}
        subprocess.run(["bash", "-c", run + commands], cwd=folder, env=env, check=True)
        pictures = PAGE.with_suffix("")
        pictures.mkdir(exist_ok=True)
        for name, file in DRAWN.items():
            small(Path(folder) / file).save(pictures / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
