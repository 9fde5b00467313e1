"""Paired differences: Student's t by scipy's own test."""

from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from fl_lightning.results.compare import compare, difference
from tests.results.folders import configured


def test_the_interval_is_that_of_the_paired_t_test(tmp_path: Path) -> None:
    values = {"a": (0.5, 0.6, 0.9, 0.7), "b": (0.4, 0.62, 0.75, 0.6)}
    for name, lr in (("a", 0.1), ("b", 0.2)):
        for seed, value in enumerate(values[name]):
            configured(tmp_path / name / f"seed_{seed}", {6: value}, seed=seed, lr=lr, lambdas={6: 10 * value})
    configured(tmp_path / "b" / "seed_9", {6: 0.1}, seed=9, lr=0.2)  # no run of a has this seed
    a, b = compare([tmp_path])
    expected = ttest_rel(values["a"], values["b"]).confidence_interval(0.95)
    for name, scale in (("mean", 1), ("flatness/lambda_max", 10)):
        paired = difference(a, b, name)
        assert paired is not None and paired.seeds == 4 and abs(paired.mean) < paired.half
        low, high = paired.mean - paired.half, paired.mean + paired.half
        assert (low, high) == pytest.approx((scale * expected.low, scale * expected.high), rel=1e-12)
    assert difference(a, b, "miou") is None
    assert paired.text("+.2f") == f"{paired.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
