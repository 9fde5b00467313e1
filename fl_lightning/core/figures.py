"""Style, ticks, legends and saving of figures.

Figures are as wide as one or two columns of a paper, no text is below 7 pt at that size, and colour is never the only
difference between lines.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.core.errors import UserError, require
from fl_lightning.core.files import write_together

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Figure
else:
    Axes = Axis = Figure = Any  # the import of matplotlib takes long; the first figure needs it

COLUMN, PAGE = 3.25, 6.75
"""Width of one column and of two, in inches."""
LETTER = 4.3 / 72
"""Mean width of a letter at 8 pt, in inches."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.handlelength": 3,
    "pdf.fonttype": 42,  # fonts as text, which journals ask for
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLORMAP = "viridis"
NOTE = ContextVar("note", default="")
"""The text of `noted`."""
EDGE = 0.1
"""Part of a panel along its edges in which contour lines have no labels."""
LETTERS = 40
"""Most letters of the ticks of a logarithmic x-axis of which all are shown."""
SPAN = 20.0
"""Values whose ratio of largest to smallest exceeds this are drawn on a logarithmic axis."""


def line_style(i: int) -> dict[str, Any]:
    """Returns colour and dashes of the i-th line; the first 49 all differ."""
    n = len(COLORS)
    return {"color": COLORS[i % n], "linestyle": DASHES[(i + i // n) % n]}


def marked_style(i: int) -> dict[str, Any]:
    """Returns colour, dashes and marker of the i-th line; the first 49 differ in colour and marker, too."""
    n = len(MARKERS)
    return {**line_style(i), "marker": MARKERS[(i + i // n) % n]}


def style() -> Any:
    """Returns the context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


@contextmanager
def new_figure(
    width: float,
    height: float,
    layout: Literal["constrained", "compressed"] = "constrained",
    grid: Literal["both", "y"] | None = None,
) -> Iterator[Figure]:
    """Makes a figure, which is drawn in the context of `style`.

    Args:
        width: In inches.
        height: In inches.
        layout: That of matplotlib.
        grid: Whether its axes have lines at the ticks of both axes, or of the y-axis alone; None: no lines.
    """
    import matplotlib.figure

    with style(), matplotlib.rc_context({"axes.grid": grid is not None, "axes.grid.axis": grid or "both"}):
        yield matplotlib.figure.Figure(figsize=(width, height), layout=layout)


def log_levels(low: float, high: float) -> list[float]:
    """Returns about ten round numbers between two positive ones, evenly spaced on a logarithmic scale."""
    from matplotlib.ticker import LogLocator

    ratio = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if ratio < 30 else (1, 2, 5) if ratio < 2000 else (1, 3) if ratio < 1e5 else (1,)
    ticks = 50 if len(subs) > 1 else 10
    return [float(level) for level in LogLocator(subs=subs, numticks=ticks).tick_values(low, high)]


def label_lines(axes: Axes, lines: Any, form: str) -> None:
    """Labels contour lines inside the panel, far from one another: its edge would leave 8 of a label 2.8."""
    import numpy as np

    places = list[Any]()
    for line in (line for path in lines.get_paths() for line in path.to_polygons(closed_only=False)):
        n = len(line) // 10  # not where a closed one begins
        points = axes.transLimits.transform(line)[n : len(line) - n]  # from 0 to 1 within the panel
        inside = np.abs(points - 0.5).max(axis=1) < 0.5 - EDGE
        if inside.any() and np.ptp(points, axis=0).max() > EDGE:
            distances = np.min([np.linalg.norm(points - place, axis=1) for place in places or points[:1]], axis=0)
            places.append(points[np.where(inside, distances, -1).argmax()])
    places = [*map(axes.transLimits.inverted().transform, places)]
    axes.clabel(lines, fmt=form, fontsize=7, inline_spacing=2, manual=places)


def scale_axis(axis: Axis, values: Iterable[float]) -> None:
    """Makes an axis logarithmic, with round numbers as ticks, if its values span more than a factor of `SPAN`.

    Args:
        axis: The x or y axis of a panel in which the values are drawn.
        values: The values; those that are not finite do not count. With 0 or less among them, the axis stays linear.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > SPAN * min(finite):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]  # missing in the stubs
        levels = log_levels(*axis.get_view_interval())
        letters = sum(len(f"{level:g}") for level in levels) if axis is axis.axes.xaxis else 0  # side by side
        axis.set_major_locator(FixedLocator(levels[:: 2 if letters > LETTERS else 1]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def wrapped(text: str, width: float) -> str:
    """Returns a title or label, broken into lines that fit into ``width`` inches at 8 pt."""
    return fill(text, max(int(width / LETTER), 8), break_on_hyphens=False)


def place_legend(figure: Figure, title: str | None = None, always: bool = False) -> None:
    """Adds one legend below the panels, in as many columns as fit; its lines of text make the figure higher.

    Args:
        figure: The figure; lines of the same label stand in the legend once.
        title: Its title.
        always: Whether a single line has one, too.
    """
    pairs = [axes.get_legend_handles_labels() for axes in figure.axes]
    width = figure.get_figwidth() - 0.2
    lines = {wrapped(label, width - 0.5): line for pair in pairs for line, label in zip(*pair, strict=True)}
    if len(lines) < (1 if always else 2):
        return
    widest = max(len(row) for label in lines for row in label.splitlines())
    columns = max(1, min(len(lines), int(width / (0.5 + widest * LETTER))))
    figure.set_figheight(figure.get_figheight() + 0.15 * (len(lines) // columns))
    figure.legend(
        lines.values(),
        lines,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        title=title and wrapped(title, width),
        title_fontsize=STYLE["legend.fontsize"],
    )


@contextmanager
def drawing() -> Iterator[None]:
    """Turns what matplotlib raises for numbers beyond its range into one line.

    Raises:
        UserError: If they cannot be drawn.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of overflow, before it gives up
            yield
    except UserError:
        raise
    except (ValueError, OverflowError) as error:
        raise UserError(f"figure: cannot be drawn ({error}); leave out the runs with numbers such as 1e308") from error


def render(figure: Figure, **files: dict[str, Any]) -> list[bytes]:
    """Returns a figure as files.

    Args:
        figure: The figure.
        **files: Metadata of each file by its format; None for the default.

    Raises:
        UserError: If its numbers are beyond what can be drawn.
    """
    _show_as_written(figure)
    contents = []
    for form, metadata in files.items():
        buffer = BytesIO()
        with style(), drawing():
            figure.savefig(buffer, format=form, dpi=300, metadata=metadata)
        figure.set_layout_engine("none")  # all files have the layout of the first
        contents.append(buffer.getvalue())
    return contents


def _show_as_written(figure: Figure) -> None:
    """Lets texts such as the names of run folders stand as they are, without formulas and controls."""
    from matplotlib.mathtext import MathTextParser
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        shown = "".join(c for c in text.get_text() if c.isprintable() or c == "\n")
        text.set_text(shown)  # else matplotlib's warning of a missing glyph has the control
        try:
            MathTextParser("path").parse(shown.replace("\n", " "))
        except ValueError:
            text.set_parse_math(False)


def figure_files(figure: Figure, name: str) -> dict[str, bytes]:
    """Returns a figure as PDF (vectors) and PNG (300 dpi), by the files' names."""
    if text := NOTE.get():
        shown = wrapped(text, (figure.get_figwidth() - 0.1) * 8 / 7)
        figure.set_figheight(figure.get_figheight() + 0.13 * len(shown.splitlines()))
        figure.suptitle(shown, x=0.01, ha="left", fontsize=7, color="0.3")
    metadata = {"Description": text} if text else {}
    pdf, png = render(figure, pdf={"CreationDate": None, "Subject": text or None}, png=metadata)
    return {f"{name}.pdf": pdf, f"{name}.png": png}


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Writes a text above all figures that are saved within, and into the metadata of their files."""
    token = NOTE.set(text)
    try:
        yield
    finally:
        NOTE.reset(token)


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Writes a figure as PDF (vectors) and PNG (300 dpi).

    Args:
        figure: The figure.
        path: The files' path without suffix; its folder is created.

    Returns:
        The two files.

    Raises:
        UserError: If it is no figure, its numbers cannot be drawn, or a file cannot be written.
    """
    require(hasattr(figure, "savefig"), "figure", f"a {type(figure).__name__}", "give a Figure of matplotlib")
    path = Path(path)
    files = {path.parent / name: content for name, content in figure_files(figure, path.name).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_together(files)
    return [*files]
