"""Run folders with metrics that are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import yaml


def write(
    folder: Path,
    accuracy: dict[int, float],
    rounds: int = 6,
    name: str = "acc",
    units: int = 2,
    lambdas: dict[int, float] | None = None,
) -> Path:
    """Writes a run with rounds of 30 s and ``units`` models of 1000 bits a round, evaluated in some of them.

    ``lambdas`` are its measurements of lambda_max by round.
    """
    folder.mkdir(parents=True)
    more = ",flatness/lambda_max,flatness/lambda_max_residual" if lambdas else ""
    rows = [f"round,server/test/loss,time/round_s,server/test/{name},comm/total_bits,comm/transmissions{more}"]
    for t in range(1, rounds + 1):
        flatness = "" if not lambdas else f",{lambdas[t]},0.001" if t in lambdas else ",,"
        rows.append(f"{t},1.0,30,{accuracy.get(t, '')},{1000 * units * t},{units * t}{flatness}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return folder


def configured(
    folder: Path,
    accuracy: dict[int, float],
    units: int = 2,
    seed: int = 0,
    lambdas: dict[int, float] | None = None,
    **settings: object,
) -> Path:
    """Writes the same with a config, as the command line leaves it."""
    data = {"class_path": "Digits", "init_args": {"seed": settings.pop("data_seed", 0)}}
    config = {
        "model": {"class_path": "FedAvg", "init_args": {"lr": settings.pop("lr", 0.1)}},
        "data": data,
        "trainer": {"seed": seed, "max_rounds": 6, **settings},
    }
    (write(folder, accuracy, units=units, lambdas=lambdas) / "config.yaml").write_text(yaml.safe_dump(config))
    return folder
