"""Style and saving of figures.

Widths are those of one or two columns of a paper, no text is below 7 pt at that size, and colour is never the only
difference between lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.25, 6.75
"""Width of a column, and of two, in inches."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.handlelength": 3,
    "pdf.fonttype": 42,  # fonts as text, which journals ask for
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLORMAP = "viridis"


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as PDF (vectors) and PNG (300 dpi).

    Args:
        figure: The figure.
        path: The files' path without suffix; its folder is made.

    Returns:
        The two files.
    """
    import matplotlib

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("pdf", "png")]
    with matplotlib.rc_context(STYLE):
        for file, metadata in zip(files, ({"CreationDate": None}, None), strict=True):
            figure.savefig(file, dpi=300, metadata=metadata)
    return files
