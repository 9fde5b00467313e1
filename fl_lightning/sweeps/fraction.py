"""Settings of a run with a fraction of its rounds: all that count in rounds change with them."""

from collections.abc import Mapping
from typing import Any

from fl_lightning.core import require

COUNTS = (
    "trainer.eval_every", "trainer.eval_last", "model.W", "model.warmup", "model.ascent.warmup",
    "model.averaging.start", "model.averaging.cycle", "model.optimizer.schedule.period",
)  # fmt: skip
"""Settings in rounds: intervals, windows, warm-ups, cycles, and the round in which something starts."""
FACTORS = ("model.optimizer.lr_decay", "model.averaging.alpha", "model.ema_alpha")
"""Factors per round of a decay: of the learning rate, and of the memory of a moving average of models."""


def scaled(config: Mapping[str, Any], fraction: float) -> dict[str, int | float]:
    """Returns the settings of a run with a fraction of its rounds, by key; those that stay are left out.

    One rule: the run is the same in less time. A number of rounds is multiplied by the fraction and rounded to at least
    1 (0 stays 0). A factor per round is raised to 1 / fraction, so that it ends at the same value. Fractions of the
    run, such as SWA's start of 0.75, stay, and so do weights of a step, such as a momentum. The fraction used is that
    of the rounded number of rounds.

    Args:
        config: A run's resolved config.
        fraction: Above 0, at most 1.

    Raises:
        UserError: If the fraction is out of range.
    """
    rounds = scaled_rounds(config, fraction)
    share = rounds / config["trainer"]["max_rounds"]
    found: dict[str, int | float] = {"trainer.max_rounds": rounds}
    found |= {key: max(1, round(n * share)) for key in COUNTS if (n := value(config, key)) is not None and n >= 1}
    found |= {key: x ** (1 / share) for key in FACTORS if (x := value(config, key)) is not None}
    return {key: number for key, number in found.items() if number != value(config, key)}


def check_fraction(fraction: float) -> None:
    """Refuses a number that is no fraction of a paper's rounds.

    Raises:
        UserError: If it is out of range.
    """
    require(0 < fraction <= 1, "rounds", fraction, "give a fraction of the paper's rounds, above 0 and at most 1")


def scaled_rounds(config: Mapping[str, Any], fraction: float) -> int:
    """Returns a fraction of a run's rounds; errors as for `scaled`."""
    check_fraction(fraction)
    whole: int = config["trainer"]["max_rounds"]
    return max(1, round(whole * fraction))


def value(config: Mapping[str, Any], key: str) -> Any:
    """Returns a value of a resolved config by its key on the command line; None if it has no such key."""
    at: Any = config
    for name in key.split("."):
        if not isinstance(at, Mapping):
            return None
        at = {**at, **(at.get("init_args") or {})}.get(name)
    return at
