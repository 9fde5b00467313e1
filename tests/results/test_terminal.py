"""Tables on terminals of any width: no number is cut, and every line fits."""

from __future__ import annotations

import io
import shlex
import sys

import pytest
from rich.console import Console
from rich.table import Column, Table

from fl_lightning.results.terminal import command, fitting, say, wrapped

NUMBERS = [["0.9749 ± 0.0018", "0.00305", "1,234,567", "×", "0.1 (2 of 5)"], ["0.5", "12.25", "1", "8", "nan"]]
HEADS = ("test accuracy ↑", "sharpness global all ↓", "GB", "rounds to 0.8 ↓", "x")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
@pytest.mark.parametrize("boxed", [True, False])
def test_no_number_is_cut(width: int, boxed: bool) -> None:
    text = "a setting of many words that goes on and on beyond the line"
    table = Table(
        "model", "rho", *(Column(head, justify="right") for head in HEADS), "on", title="results", caption="end"
    )
    table.box = table.box if boxed else None
    for name, rho, row in zip(("FedSAM", "[bold]FedGloSS[/]"), ("0.05", "0.1"), NUMBERS, strict=True):
        table.add_row(name, rho, *row, text)
    parts = list(fitting(table, width, 2))
    console = Console(file=io.StringIO(), width=width)
    console.print(*parts, sep="")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(number in shown for row in NUMBERS for number in row) and "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    keys = 2 if width > 40 else 1  # at 40 columns two settings take more than half a line: the rows have numbers
    repeated = ["model", "rho"] if keys == 2 else ["#"]
    assert all([str(c.header) for c in part.columns[:keys]] == repeated for part in parts)
    assert [str(c.header) for part in parts for c in part.columns[keys:]][-6:] == [*HEADS, "on"]
    assert shown.count("FedGloSS") == shown.count("0.05") == (len(parts) if keys == 2 else 1)
    assert shown.count("results") == 1
    assert (len(parts) == 1) == (width == 160) or width == 120
    if width >= 80:
        assert all(word in shown for word in text.split())


def test_a_table_that_fits_stays() -> None:
    table = Table("run", "x")
    assert [*fitting(table, 80)] == [table]


def test_words_of_the_settings_stay_whole() -> None:
    heads = ("model", "ascent", "partition", "alpha", "rho")
    table = Table(*heads, Column("last 20 rounds", justify="right"), Column("best", justify="right"))
    table.add_row("FedGloSS", "ASAM", "Dirichlet", "0.05", "0.1", "0.9749 ± 0.0018", "0.98")
    console = Console(file=io.StringIO(), width=80)
    console.print(*fitting(table, 80, 5), sep="")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(word in shown for word in ("FedGloSS", "Dirichlet", "0.9749 ± 0.0018")) and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


class Screen(io.StringIO):
    """A terminal as a stream."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_are_broken_between_words_on_a_terminal_only(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    line = "engine: batched (sequential 34.4 ms a round, batched 14.6 and 0.0 s once, graphed-too 12.4 and 0.7 s once)"
    assert wrapped(line, io.StringIO()) == line
    shown = wrapped(f"{line}\nsecond", screen := Screen())
    assert max(map(len, shown.splitlines())) <= columns and wrapped(shown, screen) == shown
    assert shown.split() == [*line.split(), "second"]
    args = ["fl-lightning", "fit", "--config", "runs/a b/config.yaml", "--model.optimizer.weight_decay=0.0001", "--x=1"]
    assert command(*args) == shlex.join(args)  # the tests' output is no terminal
    monkeypatch.setattr(sys, "stdout", screen)
    shown = command(*args, before="again: ").removeprefix("again: ")
    assert shlex.split(shown.replace("\\\n", "")) == args and max(map(len, shown.splitlines())) <= columns


def test_names_send_the_terminal_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    say("results: a\x1b[31m\x9b\r\n\tb")
    assert capsys.readouterr().out == "results: a\\x1b[31m\\x9b\\x0d\n\tb\n"
