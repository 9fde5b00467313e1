"""Runs the notebooks and stores them with small outputs, so that they show their pictures wherever they are read.

``python benchmarks/store_notebooks.py`` takes a few minutes on one core; names of notebooks after it run these alone.
"""

from __future__ import annotations

import base64
import sys
import time
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def smaller(png: str, colours: int = 128) -> str:
    """A picture in base64, with a small palette."""
    file = BytesIO()
    image = Image.open(BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(colours, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        metadata, start = dict(book.metadata), time.perf_counter()
        NotebookClient(book, timeout=600, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
        for cell in book.cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output["data"]["image/png"] = smaller(output["data"]["image/png"])
        book.metadata = nbformat.from_dict(metadata)
        nbformat.write(book, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
