"""The verdict on flatness, on runs whose numbers are given."""

from __future__ import annotations

import pytest

from fl_lightning.results.summary import flatness_verdict

LOSS = [(t, 2.0 / t) for t in range(1, 101)]  # halves in round 2


def verdict(*values: tuple[int, float], loss: list[tuple[int, float]] | None = None) -> str:
    return flatness_verdict({"flatness/lambda_max": list(values), "client/train/loss": LOSS if loss is None else loss})


def test_the_last_value_is_compared_with_the_highest_since_the_loss_has_halved() -> None:
    """The first one, of an untrained net, does not count, nor does a higher one before."""
    text = verdict((1, 9.0), (5, 0.8), (35, 5.25), (50, 5.0), (100, 1.3))
    assert text == "flatter, lambda_max 1.3 (round 100), from 5.25 (round 35)"
    for end in (1.0, 0.995, 1.005):  # lambda_max has a tolerance of 1 %
        assert "neither flatter nor sharper" in verdict((5, 1.0), (100, end))
    assert verdict((5, 1e-6), (100, 9.8e-7)).startswith("flatter")
    sharper = verdict((5, 0.8), (35, 0.7), (100, 1.3))
    assert sharper == "sharper, lambda_max 1.3 (round 100), from 0.8 (round 5)"


def test_the_length_of_a_run_does_not_turn_it() -> None:
    """Rounds before the loss has halved never count, however few there are."""
    slow = [(t, 2.0 if t < 40 else 1.0) for t in range(1, 101)]
    assert "from 3 (round 40)" in verdict((10, 0.1), (40, 3.0), (100, 1.0), loss=slow)
    assert "flatter" in verdict((10, 0.1), (40, 3.0), (100, 1.0), loss=slow)


@pytest.mark.parametrize(
    ("values", "loss", "text"),
    [
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (100, 1.5)], "training loss fell from 2 to 1.5, not to half"),
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (50, 1.0)], "one lambda_max since training loss had halved (round 50)"),
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (50, float("nan"))], "not to half"),
    ],
)
def test_none_qualifies(values: list[tuple[int, float]], loss: list[tuple[int, float]], text: str) -> None:
    line = verdict(*values, loss=loss)
    assert line.startswith("no verdict, ") and text in line


def test_nothing_without_two_measurements() -> None:
    assert verdict((100, 1.0)) == verdict() == verdict((5, 1.0), (100, float("nan"))) == flatness_verdict({}) == ""
