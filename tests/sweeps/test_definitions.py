"""Grid, draws and early termination are W&B's: what its own package `sweeps` 0.3.0 answered, and closed forms."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.core import UserError
from fl_lightning.sweeps.file import Hyperband, Objective, Sweep
from fl_lightning.sweeps.parameters import Bayes, Parameter, draws, flatten, grid

THEIRS = json.loads((Path(__file__).parents[1] / "golden" / "wandb_sweeps.json").read_text())


@pytest.mark.parametrize(("rule", "goal", "histories", "running", "stopped"), THEIRS["hyperband"])
def test_the_same_trials_end(rule: Any, goal: str, histories: Any, running: list[bool], stopped: list[int]) -> None:
    sign = -1 if goal == "maximize" else 1
    costs = [[sign * value for value in values] for values in histories]
    mine = Hyperband(**rule)
    assert [i for i, cost in enumerate(costs) if running[i] and mine.stops(cost, costs)] == stopped


def test_the_brackets_of_the_manual() -> None:
    assert Hyperband("hyperband", min_iter=3).brackets(81) == [3, 9, 27, 81]
    assert Hyperband("hyperband", max_iter=27, s=2).brackets(100) == [3, 9]


@pytest.mark.parametrize(("entry", "values"), THEIRS["quantiles"], ids=str)
def test_the_same_quantiles(entry: dict[str, Any], values: list[Any]) -> None:
    parameter = Parameter.of("x", entry)
    for u, value in values:
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-9)
        assert parameter.quantile(u) == expected


@pytest.mark.parametrize(("entries", "runs"), THEIRS["grid"])
def test_the_same_grid_in_the_same_order(entries: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    search = grid([Parameter.of(key, entry) for key, entry in entries.items()], None)
    assert search.propose(4) + search.propose(100) == runs
    assert search.propose(1) == []


def test_a_draw_depends_on_its_number_alone() -> None:
    parameters = [Parameter.of("a", {"min": 0.0, "max": 1.0}), Parameter.of("b", {"values": ["u", "v", "w"]})]
    many = draws(parameters, 400, 0).propose(400)
    assert draws(parameters, 3, 0).propose(3) == many[:3]
    assert draws(parameters, 3, 1).propose(3) != many[:3]
    # a mean of 400 uniform draws has a standard error of 0.0144
    assert abs(sum(settings["a"] for settings in many) / 400 - 0.5) < 0.06
    assert {settings["b"] for settings in many} == {"u", "v", "w"}


def test_bayes_finds_a_minimum_and_answers_the_same_again() -> None:
    pytest.importorskip("optuna")
    parameters = [Parameter.of("x", {"min": -1.0, "max": 3.0}), Parameter.of("name", {"values": ["a", "b"]})]

    def run() -> list[float]:
        search, values = Bayes(parameters, 40, 0), []
        while proposed := search.propose(4):
            for settings in proposed:
                values.append((settings["x"] - 1) ** 2 + (settings["name"] == "b"))
                search.observe(settings, values[-1])
        return values

    first = run()
    assert len(first) == 40 and min(first) < 0.01
    assert sum(first[20:]) < sum(first[:20])
    assert run() == first


def test_what_is_not_finite_is_a_failure_for_bayes() -> None:
    pytest.importorskip("optuna")
    search = Bayes([Parameter.of("x", {"min": 0.0, "max": 1.0})], 8, 0)
    first = search.propose(3)
    for settings, value in zip(first, (math.nan, math.inf, None), strict=True):
        search.observe(settings, value)
    assert len(search.propose(10)) == 5


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("server/test/acc", [0.1, math.nan, 0.3], 0.3),
        ("server/test/acc", [0.1, 0.3, math.inf], math.inf),
        ("server/test/acc.max", [math.nan, 0.3, 0.2, math.inf], 0.3),
        ("server/test/acc.min", [-math.inf, 0.3, 0.2], 0.2),
        ("server/test/acc_headline", [k / 20 for k in range(20)], (0.9 + 0.95) / 2),
        ("server/val/acc", [0.1], None),
    ],
)
def test_the_value_of_a_trial(name: str, values: list[float], expected: float | None, tmp_path: Path) -> None:
    rows = [f"{t},{value}\n" for t, value in enumerate(values, 1)]
    (tmp_path / "metrics.csv").write_text("".join(["round,server/test/acc\n", *rows]))
    objective = Objective(name, "minimize")
    assert objective.value(tmp_path) == (expected if expected is None else pytest.approx(expected))
    assert objective.value(None) is None and objective.value(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("entry", "form", "key"),
    [
        ({"optimizer": {"lr": {"values": [0.1]}}}, "model: {parameters: {optimizer: ...}}", "model.optimizer.lr"),
        ({"rho": {"value": 0.1}, "beta": {"min": 1, "max": 2}}, "model: {parameters: {rho: ...}}", "model.rho"),
        ({"net": {"value": {"class_path": "DigitsMLP"}}}, "model: {parameters: {net: ...}}", "model.net"),
    ],
)
def test_nested_parameters_without_the_word(entry: Any, form: str, key: str) -> None:
    with pytest.raises(UserError) as error:
        Parameter.of("model", entry)
    rule = f"nested settings stand under parameters; write {form}, or {key} as one key"
    assert str(error.value) == f"parameters.model: {rule}"


def test_nested_parameters_get_dotted_keys() -> None:
    nested = {"model": {"parameters": {"ascent": {"parameters": {"rho": {"value": 0.1}}}}}, "data.seed": {"value": 1}}
    assert flatten(nested) == {"model.ascent.rho": {"value": 0.1}, "data.seed": {"value": 1}}


COMMAND = ["${env}", "fl-lightning", "fit", "--config", "quickstart", "${args}"]


def sweep(tmp_path: Path, **changes: Any) -> Sweep:
    text = {"method": "grid", "parameters": {"model.rho": {"values": [0.1, 0.2]}}, "command": COMMAND, **changes}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in text.items() if value is not None}))
    return Sweep.read(path)


def test_a_file_as_wandb_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA", "/data")
    command = ["${env}", "${interpreter}", "cli.py", "centralized", "--data.data_dir=${envvar:MY_DATA}", "${args}"]
    file = sweep(tmp_path, command=command, program="cli.py", project="p", run_cap=3, name="n",
                 metric={"name": "server/test/acc.max", "goal": "maximize"})  # fmt: skip
    assert (file.name, file.command, file.args, file.run_cap) == ("n", "centralized", ("--data.data_dir=/data",), 3)
    assert file.objective is not None and file.objective.name == "server/test/acc.max"
    assert (file.objective.column, file.objective.sign) == ("server/test/acc", -1)
    assert sweep(tmp_path).name == "mine"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": "annealing"}, "method = annealing: give one of grid, random, bayes"),
        ({"method": None}, "method = None: give one of grid, random, bayes"),
        ({"method": "random"}, "run_cap: missing; random"),
        ({"method": "bayes", "run_cap": 3}, "metric: missing; method = bayes"),
        ({"run_cap": 0}, "run_cap = 0: give a whole number from 1 to 100,000"),
        ({"scheduler": {}}, "scheduler = .*: not supported here"),
        ({"parameters": {}}, "parameters: missing"),
        ({"parameters": {"a": 3}}, "parameters.a = 3: give a mapping"),
        ({"parameters": {"a": {"min": 1}}}, "parameters.a = .*min and max"),
        ({"parameters": {"a": {"values": []}}}, "parameters.a.values = .*give a list"),
        ({"parameters": {"a": {"min": 2, "max": 1}}}, "parameters.a.min = 2: less than max = 1"),
        ({"parameters": {"a": {"min": 0.1, "max": 1.0}}}, "parameters.a.distribution = uniform: a grid takes"),
        (
            {"parameters": {"a": {"distribution": "int_uniform", "min": 1, "max": 2.5}}},
            "parameters.a.max = 2.5: give a whole",
        ),
        (
            {"parameters": {"a": {"values": [1], "probabilities": 0.5}}},
            "parameters.a.probabilities = 0.5: one for each",
        ),
        ({"parameters": {"a": {"values": [1, 2], "probabilities": [2, -1]}}}, "parameters.a.probabilities = .*below 0"),
        ({"parameters": {"a": {"values": [1], "q": 2}}}, "parameters.a.q = 2: categorical has values"),
        ({"parameters": {"a": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "a.min = 0: .*positive"),
        ({"parameters": {"a": {"distribution": "cauchy"}}}, "parameters.a = .*distribution of W&B's"),
        ({"parameters": {"a": {"distribution": ["uniform"]}}}, "parameters.a = .*distribution of W&B's"),
        ({"metric": {"goal": "maximize"}}, "metric.name: missing"),
        (
            {"metric": {"name": "server/test/acc.max"}},
            "metric.goal: missing, and W&B would minimize",
        ),
        ({"metric": {"name": "m", "goal": "max"}}, "metric.goal = max: give one of minimize"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 3}}, "metric: missing; early_terminate"),
        ({"early_terminate": {"type": "envelope"}}, "early_terminate.type = envelope: give one of hyperband"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: give either min_iter, or max_iter"),
        ({"early_terminate": {"type": "hyperband", "max_iter": 9}}, "early_terminate.s: missing"),
        ({"early_terminate": {"type": "hyperband", "max_iter": 2, "s": 1}}, "no bracket"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 1}}, "eta = 1: give a finite number above 1"),
        ({"command": None}, "command: missing; give"),
        ({"command": ["fl-lightning", "fit"]}, r"command = .*no \$\{args\}"),
        ({"command": ["fl-lightning", "${args}"]}, "command = .*neither fit nor centralized"),
        ({"command": ["fit", "${args}", "${args_json_file}"]}, r"command = \$\{args_json_file\}: choose from"),
        ({"name": "a/b"}, "name = 'a/b': at most 150 letters in one line, without slashes"),
    ],
)
def test_what_does_not_run_here_is_refused_by_name(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{line}" if not line.startswith(("a.", "eta", "no ")) else line):
        sweep(tmp_path, **changes)


def test_quantiles_rise() -> None:
    for entry, _ in THEIRS["quantiles"]:
        parameter = Parameter.of("x", entry)
        if parameter.choices is None:
            quantiles = [parameter.quantile(u / 20) for u in range(1, 20)]
            assert all(a <= b for a, b in pairwise(quantiles)), entry
