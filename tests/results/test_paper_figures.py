"""The papers' figures: all of them are known or say why not, and their drawings show what they should."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import pytest

from fl_lightning.commands.shared.paper_figures import differing, panels
from fl_lightning.core.errors import UserError
from fl_lightning.results.clients import plot_by_client
from fl_lightning.results.curves import plot_bars, plot_lines
from fl_lightning.results.papers import PAPERS
from fl_lightning.results.recipes import Selection, figure, figures
from fl_lightning.sweeps.reproduction import figure_tasks, select, tasks

ALL = [figure for paper in PAPERS for figure in figures(paper)]
KNOWN = [figure for figure in ALL if not figure.schematic]


@pytest.mark.parametrize("figure", KNOWN, ids=lambda figure: f"{figure.paper} {figure.number}")
def test_runs_of_a_figure(figure: object) -> None:
    runs = figure_tasks(figure)  # type: ignore[arg-type]
    assert runs and len({task.name for task in runs}) == len(runs)
    for curves in panels({task: [] for task in runs}).values():
        assert figure.draws != "plane" or len(curves) in (1, 3)  # type: ignore[attr-defined]
        assert figure.draws != "line" or len(curves) == 2  # type: ignore[attr-defined]


def test_a_run_for_a_table_serves_the_figure() -> None:
    (drawn,) = figure("fedgloss", "7")
    table_tasks = {task.name: task for task in tasks(select("fedgloss", "8"))[0]}
    assert drawn.folder == "fedgloss_8" and all(table_tasks[task.name] == task for task in figure_tasks(drawn))
    (eight,) = figure("fedgloss", "8")
    assert eight.folder == "fedgloss_figure_8"  # its runs measure more than those of the table


def test_settings_that_are_tried() -> None:
    runs = figure_tasks(figure("fedgloss", "19a")[0])
    assert [task.args[-1] for task in runs[:4]] == ["--trainer.local_epochs=1"] * 4
    assert [[word for word in task.args if "rho=" in word] for task in runs[:4]] == [
        ["--model.rho=0.01"], ["--model.rho=0.05"], ["--model.rho=0.1"], ["--model.rho=0.2"],
    ]  # fmt: skip
    epochs = [task for task in figure_tasks(figure("fedsmoo", "4")[0]) if task.setting and task.setting[0] == "epochs"]
    assert [task.args[-1] for task in epochs] == [f"--trainer.local_epochs={n}" for n in (1, 2, 5, 10, 20)]


def test_measures_of_a_figure() -> None:
    config = {"trainer": {"max_rounds": 1000, "eval_every": 100, "eval_last": 1}, "model": {}}
    (first, *_) = figure_tasks(figure("fedgmt", "2")[0])
    (trial,) = first.trials(config, 0.1, [3], ["--trainer.threads=1"])
    assert trial.args[-3:] == (
        "--trainer.callbacks+={class_path: FlatnessMonitor, init_args: "
        "{every_n_rounds: 2, metrics: [CohortLoss, Sharpness]}}",
        "--trainer.seed=3",
        "--trainer.threads=1",
    )


@pytest.mark.parametrize(
    ("paper", "number", "message"),
    [
        ("fedgloss", "21", "figure = 21: no figure of fedgloss; choose from 1, 2, 4"),
        ("fedglos", "1", "paper = fedglos: no such paper; choose from fedsam"),
        ("fedgloss", "3", "figure = 3 of fedgloss: it is a schematic; choose from 1, 2, 4"),
    ],
)
def test_what_cannot_be_drawn_says_so(paper: str, number: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        figure(paper, number)


def test_parts_that_differ() -> None:
    assert differing(["CIFAR10, alpha=0, 5/100", "CIFAR10, alpha=1, 5/100"]) == ["alpha=0", "alpha=1"]
    assert differing(["one, two"]) == [""]


def test_pictures_of_rows_and_columns() -> None:
    both = panels({task: [] for task in figure_tasks(figure("fedgloss", "8")[0])})
    assert list(both) == ["CIFAR10, alpha=0.05", "CIFAR100, alpha=0.5"]
    columns = panels({task: [] for task in figure_tasks(figure("fedsam", "2a")[0])})
    assert {title: list(panel) for title, panel in columns.items()} == {"": ["alpha=0", "alpha=0.5", "alpha=1000"]}
    single = replace(figure("fedsam", "1")[0], runs=(Selection("2", "FedAvg", "CIFAR10,alpha=0,5/100,E=1"),))
    assert {title: list(panel) for title, panel in panels({task: [] for task in figure_tasks(single)}).items()} == {
        "": ["FedAvg"]
    }


def test_bars_and_lines_and_clients_have_the_numbers() -> None:
    (axes,) = plot_bars({"a": {"x": [1.0, 3.0], "y": [4.0]}, "b": {"y": [200.0]}}, "lambda").axes
    assert [bar.get_height() for group in axes.containers if hasattr(group, "patches") for bar in group.patches] == [
        2, 4, 200,
    ]  # fmt: skip
    assert axes.get_yscale() == "log" and [text.get_text() for text in axes.get_xticklabels()] == ["x", "y"]
    first, second = plot_lines({"rho": {"a": [(0.01, [1.0]), (1, [2.0])]}, "E": {"a": [(1, [1.0, 2.0])]}}, "acc").axes
    assert first.lines[0].get_xydata().tolist() == [[0.01, 1], [1, 2]] and first.get_xscale() == "log"
    assert [text.get_text() for text in first.get_xticklabels()] == ["0.01", "1"]
    assert second.lines[0].get_xydata().tolist() == [[1, 1.5]] and second.get_xlabel() == "E"
    (axes,) = plot_by_client({"FedAvg": {0: [(1, 0.5), (2, 1)], 7: [(2, 0)]}}, "accuracy").axes
    assert sorted(axes.lines[0].get_xydata().tolist()) == [[1, 0.5], [2, 0], [2, 1]]
    assert axes.lines[1].get_xydata().tolist() == [[1, 0.5], [2, 0.5]]
    assert matplotlib.rcParams["font.size"] == 10  # the style is not left on
