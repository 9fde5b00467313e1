"""Every constructor that a config can name refuses what its annotations do not describe."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import get_loader
from torch import nn

import fl_lightning
import fl_lightning.commands.shared.cli  # every class of the package is defined then
from fl_lightning import SAM, SGD, Checkpoints, Digits, DigitsMLP, Dirichlet, FedAvg, FederatedTrainer, UserError
from fl_lightning.commands.shared.index import ArgumentsError
from fl_lightning.commands.shared.parser import check_early
from fl_lightning.core import LATER, Checked, Interval, NonNegative
from fl_lightning.results.configs import load_yaml
from tests.runs import cli

POOL: dict[str, Any] = {
    "nan": float("nan"), "inf": float("inf"), "huge": 10**400, "text": "nonsense", "float": 2.5, "bool": True, "int": 1,
    "object": object(), "class": SAM,
}  # fmt: skip
RIGHT: dict[Any, set[str]] = {
    float: {"float", "int"}, int: {"int", "huge"}, bool: {"bool"}, str: {"text"}, NoneType: set(), list: set(),
    tuple: set(), dict: set(),
}  # fmt: skip
"""Values of the pool that may be right for an annotation, by hand."""


def right(hint: Any) -> set[str]:
    kind, args = get_origin(hint) or hint, get_args(hint)  # Any is a class from 3.11 on
    if kind in RIGHT:
        return RIGHT[kind]
    if kind in (Union, UnionType):
        return set[str]().union(*map(right, args))
    if kind is Annotated:
        return set(POOL) if LATER in args else right(args[0])
    if kind is Literal or (isinstance(kind, type) and kind is not Any and not args):
        return set()
    return set(POOL)  # such as Any, or a data set of the user's


def constructors(base: type = Checked) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield from constructors(cls)
        if cls.__module__.startswith("fl_lightning.") and "__init__" in vars(cls) and not inspect.isabstract(cls):
            yield cls


CLASSES = sorted({*constructors()}, key=lambda cls: cls.__qualname__)


def options(cls: type) -> dict[str, Any]:
    hints = get_type_hints(vars(cls)["__init__"], include_extras=True)
    named = [n for n, p in inspect.signature(cls.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD]
    return {name: hints[name] for name in named[1:] if name in hints}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_wrong_values(cls: type) -> None:
    for name, hint in options(cls).items():
        for key in POOL.keys() - right(hint):
            with pytest.raises(UserError, match=rf"^[\w.: ]*{name} = .*: give ") as raised:
                cls(**{name: POOL[key]})
            assert len(str(raised.value).splitlines()) == 1
            assert len(str(raised.value)) < 250


def test_the_table_is_whole() -> None:
    """No public class that a config can name is left out; all options with a choice are among those above."""
    named = [value for n in fl_lightning.__all__ if inspect.isclass(value := getattr(fl_lightning, n))]
    unchecked = {cls.__name__ for cls in named if not issubclass(cls, Checked)}
    assert unchecked == {"UserError"}
    flat = [hint for cls in CLASSES for option in options(cls).values() for hint in (option, *get_args(option))]
    assert sum(get_origin(hint) is Literal for hint in flat) >= 34
    assert sum(len(POOL.keys() - right(hint)) for cls in CLASSES for hint in options(cls).values()) > 1000


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("[0, inf)", [0, 1e300], [-1e-300], "of 0 or more"),
        ("[1, inf)", [1, 2], [0.5], "of at least 1"),
        ("(0, inf)", [1e-300], [0], "above 0"),
        ("[0, 1]", [0, 1], [-0.1, 1.1], "from 0 to 1"),
        ("[0, 1)", [0, 0.999], [1], "from 0 to below 1"),
        ("(0, 1]", [1e-9, 1], [0, 1.1], "above 0 and at most 1"),
        ("[1, 1e6]", [10**6], [10**6 + 1], "from 1 to 1,000,000"),
    ],
)
def test_intervals(interval: str, inside: list[float], outside: list[float], words: str) -> None:
    limits = Interval(interval)
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in outside)
    assert str(limits) == words


def test_right_values_pass() -> None:
    """Ints pass for floats, numbers of NumPy, tuples for lists, paths for text, null where it may be."""
    assert SGD(lr=1, momentum=np.float32(0.5), clip=None).momentum == 0.5
    assert Digits(num_clients=np.int64(3), mean=(0.5,), std=np.array([0.5])).num_clients == 3
    assert Checkpoints(every_n_rounds=3, monitor=None).every_n_rounds == 3


def test_a_class_of_the_user() -> None:
    """Of its own options those with a range or a choice are checked; an annotation that cannot be read is not."""

    class Own(FedAvg):
        def __init__(self, net: DigitsMLP, gain: NonNegative = 1.0, odd: Unknown = 1, **kwargs: Any) -> None:  # type: ignore[name-defined] # noqa: F821
            super().__init__(net, **kwargs)

    class Plain(SAM):
        def __init__(self, gain: NonNegative = 1.0, length: float = 1.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    Own(DigitsMLP(8), gain=-1.0)
    with pytest.raises(UserError, match=r"^model\.weighting = sum: give one of samples, uniform or null$"):
        Own(DigitsMLP(8), weighting="sum")
    with pytest.raises(UserError, match=re.escape("model.ascent.gain = nan: give a finite number of 0 or more")):
        Plain(gain=float("nan"))
    with pytest.raises(UserError, match=re.escape("model.ascent.rho = inf: give a finite number of 0 or more")):
        Plain(length=float("inf"), rho=float("inf"))
    with pytest.raises(UserError, match=r"^model\.ascent\.nothing = 1: no such setting; choose from eps, gain, "):
        Plain(nothing=1)
    with pytest.raises(
        UserError, match=r"^model\.ascent\.lenght = 1: no such setting; did you mean model.ascent.length\?$"
    ):
        Plain(lenght=1)

    class Choice(FedAvg):
        def __init__(self, net: nn.Module, way: Literal[1, True, None] = 1, **kwargs: Any) -> None:
            super().__init__(net, **kwargs)

    assert all(Choice(DigitsMLP(8), way=way).trained is False for way in (1, True, None))
    with pytest.raises(UserError, match=r"^model\.way = 2: give one of 1, True, None$"):
        Choice(DigitsMLP(8), way=2)

    class Wrong(FedAvg):
        def __init__(self, weighing: str = "", **kwargs: Any) -> None:
            super().__init__(torch.nn.Linear(1, 1, weighing=weighing), **kwargs)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'weighing'"):  # a mistake in the class itself
        Wrong(weighing="samples")


def test_lists_name_the_key() -> None:
    with pytest.raises(UserError, match=r"^data.std = \[0.5, -1\]: give a list, each a finite number of at least"):
        Digits(std=[0.5, -1])
    with pytest.raises(
        UserError, match=r"^data.partition = the class Dirichlet: give Partition or null, such as Dirichlet\(\.\.\.\)$"
    ):
        Digits(partition=Dirichlet)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^trainer.max_rounds = '5': give a whole number of at least 1$"):
        FederatedTrainer(max_rounds="5")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: a is there twice"),
        ("x: {a: 1, a: 2}", "line 1: a is there twice"),
        ("a: &a [*a]", r"line 1: \*a stands within itself"),
        ("[" * 900 + "]" * 900, "line 1: nested deeper than 50"),
            ("[" * 3000 + "]" * 3000, "nest"),  # PyYAML 6.0.4 says it before us
        *((text, "Error: ") for text in ("!!timestamp 2026-99-99", "!!bool x", "!!int x", "9" * 5000, "\udcff")),
        ("a: &a [1, 1]\n" + "\n".join(f"{b}: &{b} [*{a}{f', *{a}' * 9}]" for a, b in pairwise("abcdefg")), "unfolds"),
    ],
)  # fmt: skip
def test_yaml_that_misleads(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem):
        load_yaml(text)


@pytest.mark.parametrize("deep", [True, False])
def test_yaml_is_checked_before_anything_reads_it(deep: bool, tmp_path: Path) -> None:
    nets = "".join(
        f"a{i}: &a{i} {{{', '.join(f'p{j}: {{init_args: *a{i - 1}}}' for j in range(9))}}}\n" for i in range(1, 12)
    )
    bomb = f"a0: &a0 {{class_path: X}}\n{nets}model: {{class_path: FedAvg, init_args: *a11}}\n"
    (path := tmp_path / "bomb.yaml").write_text(f"model: {'{a: ' * 3000}1{'}' * 3000}" if deep else bomb)
    with pytest.raises(ArgumentsError, match=r"^Problems parsing config: line \d: (nested deeper|unfolds)"):
        check_early("fit", "--config", str(path))
    with pytest.raises(SystemExit, match=r"error: config = .*: line \d: (nested deeper|unfolds)"):
        cli("fit", "--config", str(path))


def test_yaml_that_does_not() -> None:
    text = "a: {x: 1, y: {x: 2}}\nb: [&l {a: 1}, {a: 2}]\nc: *l\nd: {<<: *l, a: 3}\n? [1]\n: ''"
    expected = "a: {x: 1, y: {x: 2}}\nb: [{a: 1}, {a: 2}]\nc: {a: 1}\nd: {a: 3}"
    assert load_yaml(text.rpartition("\n?")[0]) == yaml.safe_load(expected)
    assert load_yaml("") is None
    numbers = ["1e-2", "1E5", "+1.5e3", ".5", "1_0.5", "-.inf", "09", "0x1F", "1e", "-", "2026-11-27", "v1.0"]
    values = load_yaml(f"[{', '.join(numbers)}]")  # as to the command line
    assert values == [0.01, 1e5, 1500.0, 0.5, 10.5, -math.inf, "09", 31, "1e", "-", "2026-11-27", "v1.0"]
    assert [type(value) for value in values[:9]] == [type(get_loader("yaml")(value)) for value in numbers[:9]]
