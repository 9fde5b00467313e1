"""Figures as parts of the page: drawings as SVG in the page itself, pictures that lie in run folders as they are."""

from __future__ import annotations

import base64
import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from fl_lightning.core import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ZOOM = 1.5
"""Largest size of a drawing on the page, relative to its size on paper."""


def element(figure: Figure | Path, title: str, number: int) -> Markup:
    """Returns the element that shows a figure.

    Args:
        figure: A drawing, or the PNG file of a picture.
        title: What it shows, for readers who do not see it.
        number: Its number on the page, so that no two drawings share an id.
    """
    if isinstance(figure, Path):
        data = base64.b64encode(figure.read_bytes()).decode()
        return Markup(f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">')
    text = StringIO()
    with style():
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawing = text.getvalue().partition("<svg")[2].partition(">")[2]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'\bid="(run-\d+)"', r'class="\1"', drawing)  # the lines of a run, which its button hides
    drawing = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>f{number}-", drawing)
    width, height = 72 * figure.get_size_inches()
    most = f"max-width: {ZOOM * width / 72:.3g}in"
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" style="{most}">'
    return Markup(head + drawing)
