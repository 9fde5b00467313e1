"""What ``--print_config`` prints is the config that it was made from."""

from __future__ import annotations

import json
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.runs import DIGITS, cli

NAMES = ["a", "1e3", "true", "1", "a: b", "a/b", "ü", "- x", "#x", "a #x", "a#x", "#", "x: #y", "'"]
numbers = st.floats(1e-300, 1e300, allow_nan=False)
OPTIONS = {
    "model.optimizer.lr": numbers,
    "model.rho": numbers,
    "model.optimizer.clip": st.none() | numbers,
    "model.weighting": st.sampled_from([None, "samples", "uniform"]),
    "data.batch_size": st.none() | st.integers(1, 10**9),
    "data.mean": st.none() | st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3),
    "data.drop_last": st.booleans(),
    "trainer.max_rounds": st.integers(1, 10**18),
    "trainer.devices": st.integers(1, 9) | st.sampled_from(["auto", "1,3"]),
    "trainer.name": st.none() | st.sampled_from(NAMES),
}


def printed(*args: str) -> str:
    with redirect_stdout(out := StringIO()), suppress(SystemExit):
        cli("fit", *args, "--print_config")
    return out.getvalue()


def setting(config: dict[str, Any], key: str) -> object:
    node = config
    for name in key.split("."):
        node = node["init_args"] if "init_args" in node and name not in node else node
        node = node[name]
    return node


@pytest.mark.parametrize("name", ["#x", "a #x", "x: #y"])
def test_name(name: str) -> None:
    assert yaml.safe_load(printed("--model=FedAvg", *DIGITS, f"--trainer.name={name}"))["trainer"]["name"] == name


@pytest.mark.slow
@settings(
    max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.fixed_dictionaries(OPTIONS))
def test_config_round_trip(tmp_path: Path, chosen: dict[str, object]) -> None:
    options = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items()]
    first = printed("--model=FedSAM", *DIGITS, *options)
    (path := tmp_path / "config.yaml").write_text(first)
    assert printed(f"--config={path}") == first
    for key, value in chosen.items():
        actual = setting(yaml.safe_load(first), key)
        assert actual == (pytest.approx(value, rel=1e-15) if isinstance(value, float) else value), key
