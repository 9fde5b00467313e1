"""Rows of the ledger: run folders without their checkpoints, which anybody can train again and compare to the bit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import Figure, ensure, json_text, read_json, write_atomically
from fl_lightning.results.compare import ROW, compare
from fl_lightning.results.configs import EXECUTION, config_files, group_id, is_private, read_config
from fl_lightning.results.curves import plot_curves, plot_tradeoff
from fl_lightning.results.metrics import DIRECTIONS, Pairs, markdown, read_metrics, read_rows, table_text, tested
from fl_lightning.results.metrics import FILE as METRICS
from fl_lightning.results.report.files import PROVENANCE
from fl_lightning.results.table import Markup, cell, columns, differences

FILE = ROW
"""In a row: whose run it is, and what `compare_run` found when somebody trained it again."""
SUMMED = ("time/round_s", "time/cpu_s")
"""Metrics whose values since the row before are summed when rows are left out."""


def rows(folder: Path) -> list[Path]:
    """Returns the rows below a folder, in the order of their paths.

    Raises:
        UserError: If there is none.
    """
    found = sorted(path.parent for path in folder.glob(f"**/{FILE}"))
    ensure(bool(found), f"{folder}: no row of a ledger there; add one by fl-lightning ledger add")
    return found


def about(row: Path) -> dict[str, Any]:
    """Returns the content of a row's ``row.json``.

    Raises:
        UserError: If it is not readable.
    """
    return dict(read_json(row / FILE, dict[str, Any]))


def row_files(run: Path, ran: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a row, by file name.

    Args:
        run: The folder of a run.
        ran: What the checkpoint knows of it, such as a hash of its weights.

    Raises:
        UserError: If a file of the run is missing or damaged.
    """
    configs = config_files(run)
    ensure(len(configs) == 1, f"{run}: has {len(configs)} configs; a row is a run of one config, without changes")
    given, starts = read_config(configs[0]), _starts(run / "provenance.json")
    ensure(
        not is_private(given),
        f"{run}: a run under trainer.privacy, whose folder is not public; publish its net, by fl-lightning export",
    )
    config = portable(given)
    ensure(
        not any(start.get("made_by") == "a program" for start in _read(run)),
        f"{run}: a program has made its objects and weights; a row is a run of `fl-lightning fit`",
    )
    engines = {start["engine"] for start in starts}
    ensure(len(engines) == 1, f"{run}: trained by {len(engines)} engines; a row is a run of one engine")
    config["trainer"]["engine"] = engines.pop()  # where it was auto
    text = {
        "settings": group_id(config),
        "seed": config["trainer"]["seed"],
        "data_seed": config["data"]["init_args"]["seed"],
        **ran,
        "starts": starts,
        "checks": [],
    }
    more = [*run.glob(DIRECTIONS), *run.glob("flatness*/*.json")]
    return {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        METRICS: thinned(run / METRICS),
        FILE: json_text(text, indent=1),
        **{str(path.relative_to(run)): path.read_text() for path in more},
    }


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without what belongs to one machine: names, folders and loggers of the run, paths of files."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if isinstance(value, list):
            return list(map(moved, value))
        return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value

    left_out = set(EXECUTION) - {
        "engine", "client_block", "compile", "accelerator", "devices", "threads", "client_memory", "callbacks"
    }  # fmt: skip
    trainer = {key: value for key, value in config["trainer"].items() if key not in left_out}
    return dict(moved({**config, "trainer": trainer}))


def thinned(path: Path) -> str:
    """Returns ``metrics.csv`` with the rounds alone in which something was evaluated or measured, and the last one."""
    head, *lines = read_rows(path)
    looked = [i for i, name in enumerate(head) if name.startswith(("server/", "flatness/"))]
    sums, kept = {i: 0.0 for i, name in enumerate(head) if name in SUMMED}, list[list[str]]()
    for line in lines:
        sums = {i: total + float(line[i] or 0) for i, total in sums.items()}
        if line is lines[-1] or any(line[i] for i in looked):
            kept.append([str(sums.get(i, cell)) for i, cell in enumerate(line)])
            sums = dict.fromkeys(sums, 0.0)
    return table_text(head, kept)


@dataclass(frozen=True)
class Again:
    """A row trained again, beside the row.

    Attributes:
        start: What the bits of the new run depend on.
        apart: The metrics that differ, but for times, and their largest relative differences.
        same: Whether weights and metrics are equal to the bit.
        alike: Whether processor, torch and engine are those of the row.
        final: Absolute difference of the last evaluation.
    """

    start: Mapping[str, Any]
    apart: Mapping[str, float]
    same: bool
    alike: bool
    final: float

    def text(self) -> str:
        """Returns the comparison in a line."""
        if self.same:
            return "equal to the bit"
        far = ", ".join(f"{name} {value:.1e}" for name, value in self.apart.items()) or "its weights"
        place = "" if self.alike else f"on {self.start['cpu']}, torch {self.start['torch']}, which is not the row's: "
        return f"{place}the last evaluation is {self.final:.4f} away; relative differences: {far}"


def compare_run(row: Path, run: Path, ran: Mapping[str, Any]) -> Again:
    """Compares a run of a row's config with the row.

    Args:
        row: The row.
        run: The folder of the run.
        ran: What its checkpoint knows of it, as for `row_files`.

    Raises:
        UserError: If its data are others.
    """
    kept = about(row)
    ensure(kept["data"] == ran["data"], f"{row}: was trained on other data; give its data by --data...")
    before, here = read_metrics(row / METRICS), read_metrics(run / METRICS)
    apart = {name: _apart(pairs, dict(here.get(name, ()))) for name, pairs in before.items() if name[:5] != "time/"}
    (start,) = _starts(run / "provenance.json")
    alike = all(each[key] == start[key] for each in kept["starts"] for key in ("cpu", "device", "torch", "engine"))
    evaluated = tested(before)[0]
    final = abs(before[evaluated][-1][1] - here[evaluated][-1][1])
    far = {name: value for name, value in apart.items() if value}
    return Again(start, far, not far and kept["weights"] == ran["weights"], alike, final)


def note(row: Path, again: Again) -> None:
    """Writes into a row what a run of its config has found."""
    kept, found = about(row), {**again.start, "same": again.same, "final": again.final}
    write_atomically(row / FILE, json_text({**kept, "checks": [*kept["checks"], found]}, indent=1))


def _apart(before: Pairs, here: Mapping[float, float]) -> float:
    """Returns the largest relative difference of values by round; infinite, if one is missing or not finite."""
    pairs = [(value, here.get(at, math.inf)) for at, value in before]
    unequal = [(a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
    apart = (abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf for a, b in unequal)
    return max(apart, default=0.0)


def _starts(path: Path) -> list[dict[str, Any]]:
    """Returns of each start what its bits depend on; nothing of a run that does not say."""
    return [
        {
            **{key: start.get(key) for key in ("round", "date", "engine", "precision")},
            **{key: start["machine"].get(key) for key in ("cpu", "device", "threads", "processes")},
            "torch": start["versions"]["torch"],
            "commit": (start["code"]["package"] or {}).get("commit"),
            "changed": bool((start["code"]["package"] or {}).get("changes")),
        }
        for start in _read(path.parent)
    ]


def _read(run: Path) -> list[dict[str, Any]]:
    """Returns what a run has noted of each of its starts."""
    return list(read_json(run / "provenance.json", PROVENANCE, {}).get("starts", []))


ABOUT = "about.yaml"
"""In the folder of a ledger: title, text, and the reference's folder."""


FEW = 4
"""Most groups whose curves are drawn; of more, a reader cannot tell one from another."""


def page(rows: Sequence[Path]) -> tuple[str, Callable[[], Figure]]:
    """Returns the page of rows, as Markdown, and what draws it: curves, or accuracy against lambda_max of many methods.

    Args:
        rows: The rows; ``about.yaml`` of the nearest folder above the first one gives title, text and reference.

    Raises:
        UserError: If a row is damaged.
    """
    heading, groups = _about(rows[0]), compare(rows)
    shown = [c for c in columns(groups) if c.table in ("results", "clients") and c.key != "std_rounds"]
    reference = next((group for group in groups if group.name == heading.get("reference")), groups[0])
    kept = {group.name: [about(row) for row in group.folders] for group in groups}
    shown += differences(shown, reference, reference.name)
    bold = Markup(best="**{}**")
    head = ["method", "seeds", "checked", *(c.head for c in shown)]
    lines = [
        [
            group.name,
            str(len(group.runs)),
            str(sum(any(check["same"] for check in row["checks"]) for row in kept[group.name])),
            *(cell(group, column, groups, bold) for column in shown),
        ]
        for group in groups
    ]
    first = kept[groups[0].name][0]["starts"][0]
    starts = [start for of in kept.values() for row in of for start in row["starts"]]
    commits, cpus = (
        sorted({(start["commit"] or "unknown")[:7] + " with changes" * start["changed"] for start in starts}),
        sorted({start["cpu"] for start in starts}),
    )
    made = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, torch {first['torch']}, {first['precision']}."
    checked = (
        "*Checked* counts the rows that another process has trained again to the bit. Differences are means over the "
        "common seeds, with 95 % intervals by Student's t; bold if those against all other rows leave out 0, or, with "
        "one seed, the best."
    )
    text = "\n\n".join([f"# {heading['title']}", heading["text"], markdown([head, *lines]).strip(), checked, made])
    runs = {group.name: group.metrics for group in groups}
    return text, lambda: plot_curves(runs) if len(groups) <= FEW else plot_tradeoff(groups, "lambda_max")


def _about(row: Path) -> dict[str, str]:
    found = next((folder / ABOUT for folder in row.parents if (folder / ABOUT).is_file()), None)
    return {"title": "Ledger", "text": "", **(read_config(found) if found else {})}
