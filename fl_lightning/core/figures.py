"""Style, ticks and saving of figures.

Figures are as wide as one or two columns of a paper, no text is below 7 pt at that size, and colour is never the only
difference between lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.25, 6.75
"""Width of one column and of two, in inches."""

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
SPAN = 20.0
"""Values whose ratio of largest to smallest exceeds this are drawn on a logarithmic axis."""


def line_style(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th line; the first 49 all differ."""
    n = len(COLORS)
    return {"color": COLORS[i % n], "linestyle": DASHES[(i + i // n) % n]}


def style() -> Any:
    """The context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def log_levels(low: float, high: float) -> list[float]:
    """About ten round numbers between two positive ones, evenly spaced on a logarithmic scale."""
    from matplotlib.ticker import LogLocator

    ratio = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if ratio < 30 else (1, 2, 5) if ratio < 2000 else (1, 3) if ratio < 1e5 else (1,)
    return [float(level) for level in LogLocator(subs=subs, numticks=50).tick_values(low, high)]


def log_ticks(axes: Axes) -> None:
    """Labels a logarithmic y axis at round numbers that leave room for each other."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    axes.yaxis.set_major_locator(FixedLocator(log_levels(*axes.get_ylim())))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as PDF (vectors) and PNG (300 dpi).

    Args:
        figure: The figure.
        path: The files' path without suffix; its folder is created.

    Returns:
        The two files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("pdf", "png")]
    with style():
        for file, metadata in zip(files, ({"CreationDate": None}, None), strict=True):
            figure.savefig(file, dpi=300, metadata=metadata)
    return files
