"""The verdict on flatness, on runs whose numbers are given."""

from __future__ import annotations

import pytest

from fl_lightning.results.verdict import flatness_verdict

LOSS = [(t, 2.0 / t) for t in range(1, 101)]  # halves in round 2


def verdict(*values: tuple[int, float], loss: list[tuple[int, float]] | None = None, **more: float) -> str:
    columns = {"flatness/lambda_max": list(values), "client/train/loss": LOSS if loss is None else loss}
    return flatness_verdict(columns | {f"flatness/{name}": [(100, value)] for name, value in more.items()})


def test_the_last_value_is_compared_with_the_highest_since_the_loss_has_halved() -> None:
    """Not with the first one, of an untrained net, and not with a higher one before."""
    text = verdict((1, 9.0), (5, 0.8), (35, 5.25), (50, 5.0), (100, 1.3))
    assert text == (
        "the global minimum got flatter: lambda_max is 1.3 in round 100 (training loss 0.02); the highest before, "
        "since training loss had halved in round 2, was 5.25 in round 35 (training loss 0.05714)"
    )
    assert "neither flatter nor sharper" in verdict((5, 1.0), (100, 1.0))
    sharper = verdict((5, 0.8), (35, 0.7), (100, 1.3), discrepancy=0.25)
    assert "sharper: lambda_max is 1.3 in round 100" in sharper and "was 0.8 in round 5" in sharper
    assert sharper.endswith("; local and global flatness differ by 0.25")


def test_the_length_of_a_run_does_not_turn_it() -> None:
    """Rounds before the loss has halved never count, however few there are."""
    slow = [(t, 2.0 if t < 40 else 1.0) for t in range(1, 101)]
    assert "was 3 in round 40" in verdict((10, 0.1), (40, 3.0), (100, 1.0), loss=slow)
    assert "flatter" in verdict((10, 0.1), (40, 3.0), (100, 1.0), loss=slow)


@pytest.mark.parametrize(
    ("values", "loss", "text"),
    [
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (100, 1.5)], "training loss has not halved, it was 2 at first and 1.5 at"),
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (50, 1.0)], "only once since training loss had halved in round 50"),
        ([(5, 1.0), (100, 2.0)], [(1, 2.0), (50, float("nan"))], "has not halved"),
    ],
)
def test_none_qualifies(values: list[tuple[int, float]], loss: list[tuple[int, float]], text: str) -> None:
    found = verdict(*values, loss=loss)
    assert found.startswith("no verdict: ") and text in found


def test_nothing_without_two_measurements() -> None:
    assert verdict((100, 1.0)) == verdict() == verdict((5, 1.0), (100, float("nan"))) == flatness_verdict({}) == ""
