"""Split and sample files with random faults: they load, or one line refuses them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning import Arrays, FromFile, ReplaySampler, UserError

LABELS = np.arange(40) % 4
SPLIT = json.dumps({str(k): list(range(10 * k, 10 * k + 10)) for k in range(4)})
ROUNDS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
faults = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=4)
"""Where, how many bytes are taken away, what comes in their place."""


def faulty(content: bytes, faults: list[tuple[float, int, bytes]]) -> bytes:
    for place, removed, inserted in faults:
        start = int(place * len(content))
        content = content[:start] + inserted + content[start + removed :]
    return content


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def read_split(path: Path) -> None:
    try:
        parts = FromFile(str(path))(LABELS, 4, 4, 0)
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        indices = np.concatenate(parts)
        assert len(parts) == 4 and len(set(indices)) == len(indices) and set(indices) <= set(range(40))


@ROUNDS
@given(where=faults)
def test_split_with_faults(where: list[tuple[float, int, bytes]], file: Path) -> None:
    file.write_bytes(faulty(SPLIT.encode(), where))
    read_split(file)


@ROUNDS
@given(content=values)
def test_split_of_any_json(content: object, file: Path) -> None:
    file.write_text(json.dumps(content))
    read_split(file)
    with suppress(UserError):
        ReplaySampler(str(file)).check(1, 4)


@ROUNDS
@given(where=faults)
def test_npz_with_faults(where: list[tuple[float, int, bytes]], tmp_path: Path) -> None:
    path, x = tmp_path / "file.npz", np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(path, x_train=x, y_train=LABELS, x_test=x[:8] + 1, y_test=LABELS[:8])
    path.write_bytes(faulty(path.read_bytes(), where))
    try:
        data = Arrays(path=str(path), num_clients=4)
        data.setup()
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        assert len(data.clients) == 4 and bool(data.x_train.isfinite().all())
