"""``fl-lightning flatness``: measures of flatness on a checkpoint."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from rich.table import Column, Table

from fl_lightning import FederatedDataModule, LocalObjective
from fl_lightning.commands.shared.landscapes import (
    Step,
    labels_of,
    number_of,
    output_folder,
    progress_bar,
    save_figures,
)
from fl_lightning.core import ensure, json_text
from fl_lightning.engine import LocalResult
from fl_lightning.results import PROTOCOL, say, show_table, write_table
from fl_lightning.trainer import (
    Cohort,
    FederatedTrainer,
    FlatnessMonitor,
    Measure,
    Measurement,
    MeasurementContext,
    PseudoGradient,
    Run,
    check_measures,
    default_measures,
    dry_round,
    figures,
)

NULL = FlatnessMonitor.NULL
"""What null stands for, as in a config."""
RETRAINED = "(cohort retrained from the checkpoint)"


def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str,
    metrics: Sequence[Measure] | None = None,
    out: str | None = None,
) -> list[Measurement]:
    """Measures a checkpoint; writes ``flatness.json``, ``flatness.csv`` and figures, and shows a table.

    Nothing is overwritten: further measurements are ``flatness_2.json`` and so on. Figures also go to the W&B run.

    A checkpoint holds no local models. For measures that need them, the cohort of the next round (after the last round,
    the last cohort again) is trained from the checkpoint, and nothing of it is kept. An interrupt keeps what was
    measured before.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        ckpt_path: The checkpoint, or "last".
        metrics: The measures; by default LambdaMax and Discrepancy.
        out: Folder for the files; by default ``flatness`` in the run folder.

    Returns:
        The measurements.
    """
    measures = default_measures(model) if metrics is None else metrics
    ensure(
        len(measures) > 0,
        "metrics: none is given, or suits the model; give some, such as ClientLambdaMax(clients: own)",
    )
    measurements: list[Measurement] = []
    loaded = trainer.load(model, data, ckpt_path, clients=True)
    check_measures(measures, loaded)
    folder = output_folder(loaded, out, "flatness")
    assert loaded.checkpoint is not None
    try:
        with progress_bar(loaded.fabric) as step:
            _measure(loaded, measures, measurements, step)
        if not measurements:
            names = ", ".join(type(measure).__name__ for measure in measures)
            loaded.fabric.print(
                f"{names}: nothing was measured; no client has trained, or the pseudo-gradient of the round before is "
                "missing, which a run keeps if its FlatnessMonitor has this measure"
            )
    finally:
        if measurements and loaded.fabric.is_global_zero:
            number = number_of(folder, "flatness.json")
            _save(folder, number, loaded, measurements)
            label = f"{labels_of([loaded.checkpoint])[0]}, round {loaded.rounds_done}"
            save_figures(loaded, folder, figures(measurements, label), number, "flatness/")
            _show(folder / f"flatness{number}.json", loaded, measurements)
    return measurements


def _measure(run: Run, measures: Sequence[Measure], measurements: list[Measurement], step: Step) -> None:
    """Appends the new measurements; at an interrupt, those made so far."""
    trained = [measure for measure in measures if measure.of_round]
    total, cohort = len(measures) + len(trained), Cohort.drawn(run, run.next_round).clients
    context = MeasurementContext.between_rounds(run, cohort)
    if trained:
        for i, measure in enumerate(trained):
            step(i, total, f"{type(measure).__name__}: local training")
            measure.begin(run, cohort)
        context = _after_dry_round(context, trained)
    for i, measure in enumerate(measures, start=len(trained)):
        name = type(measure).__name__
        step(i, total, name)
        try:
            new = measure.compute(replace(context, progress=partial(_products, step, i, total, name)))
        except KeyboardInterrupt as stop:
            measurements += getattr(stop, "partial", [])
            raise
        measurements += [replace(m, model=f"{m.model} {RETRAINED}") for m in new] if measure in trained else new
    step(total, total, "done")


def _products(step: Step, count: int, total: int, name: str, done: int, most: int) -> None:
    step(count, total, f"{name}: {done} of at most {most} products")


def _after_dry_round(context: MeasurementContext, measures: Sequence[Measure]) -> MeasurementContext:
    """Returns the context after one more round, whose local models update the measures."""
    run, pseudo_gradient = context.run, PseudoGradient(context.run)

    def update(result: LocalResult) -> None:
        pseudo_gradient.add(result)
        for measure in measures:
            measure.update(run, result)

    after = dry_round(run, context.cohort, update)
    monitors = [state for key, state in run.restored.get("callbacks", {}).items() if key.startswith("FlatnessMonitor")]
    previous = next((v.to(after.w) for state in monitors if (v := state["pseudo_gradient"]) is not None), None)
    return replace(context, new=after, pseudo_gradient=pseudo_gradient.value(), previous=previous)


def _save(folder: Path, number: str, run: Run, measurements: Sequence[Measurement]) -> None:
    about = {"checkpoint": str(run.checkpoint), "round": run.rounds_done, "seed": run.seed, "protocol": PROTOCOL}
    rows = [*map(vars, measurements)]
    (folder / f"flatness{number}.json").write_text(json_text({**about, "measurements": rows}, indent=1))
    columns = [column.name for column in fields(Measurement) if column.name != "details"]
    cells = ([json_text(row[name]).strip() if name == "settings" else row[name] for name in columns] for row in rows)
    write_table(folder / f"flatness{number}.csv", columns, cells)


def _show(path: Path, run: Run, measurements: Sequence[Measurement]) -> None:
    twice = len({m.name for m in measurements}) < len(measurements)
    table = Table(
        "measure",
        *(Column(head, justify="right") for head in ("value", "±")),
        *(["on"] if twice else []),
        title=f"Flatness after round {run.rounds_done}",
        caption=f"* {RETRAINED}" if any(RETRAINED in m.model for m in measurements) else None,
    )
    for m in measurements:
        spread = f"{m.error:.2g}" if m.error is not None else ""
        if m.residual is not None and m.value is not None:
            spread = f"{abs(m.residual * m.value):.1g} (residual)"
        value, mark = "undefined" if m.value is None else f"{m.value:.4g}", "*" if RETRAINED in m.model else ""
        on = [m.protocol().replace(f" {RETRAINED}", "*")] if twice else []
        table.add_row(f"{m.name}{mark}", value, spread, *on)
    show_table(table)
    say(f"results: {path} (with the protocol of each measure)")
