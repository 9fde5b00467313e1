"""Tables of all that gpu.json holds, for a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.legs.items import is_failure
from benchmarks.legs.science import EVAL_LAST, ROUNDS, ROWS, SEED, summary
from fl_lightning.core import UserError
from fl_lightning.results.metrics import markdown, read_run
from fl_lightning.results.papers import find
from fl_lightning.results.rows import located

BLOCK = re.compile(r"(<!-- gpu -->\n).*?(<!-- /gpu -->)", re.DOTALL)
ENGINES = ("sequential", "batched", "graphed", "compiled")
PLAIN = "plain loop"
PAPERS = {
    "FedGloSS": {"paper": "fedgloss", "table": "3", "metric": "acc"},
    "ECCV 2022": {"paper": "fedsam", "table": "2", "metric": "acc"},
    "FedGF": {"paper": "fedgf", "table": "1", "metric": "acc"},
}
"""Tables with the accuracy of the science leg's setting."""
PER_CLASS = {"alpha=0.05": "alpha=0.005"}
"""FedGF prints the parameter of a class, the others that of all ten."""
LEDGER = Path(__file__).parents[2] / "ledger/cifar10"
Found = dict[str, dict[str, Any]]
Lines = list[list[str]]


def renew(page: Path, content: Found) -> None:
    """Puts the tables of all machines between the comments of a page.

    Raises:
        ValueError: If there are no results, or the page has no place for them.
    """
    text = page.read_text()
    if not content:
        raise ValueError("there is nothing to report: run a leg first, or name its file with --out")
    if not BLOCK.search(text):
        raise ValueError(f"{page} has no comments <!-- gpu --> and <!-- /gpu --> to put the tables between")
    sections = "\n".join(section(results) for results in content.values())
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}\n{sections}\n{match[2]}", text))


def section(results: dict[str, Any]) -> str:
    """Returns the results of one machine."""
    machine = results["machine"]
    versions = ", ".join(
        f"{name} {machine[key]}" for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("Python", "python"))
    )
    head = "Measured" if machine["kind"] == "cuda" else "In small, to try the program"
    parts = [f"## {head}: {machine['device']}\n\n{versions}.\n"]
    for leg, tables in (("correctness", correctness), ("speed", speed), ("science", science)):
        if items := results.get(leg):
            parts += [f"### {leg.capitalize()}\n", *tables(items)]
            errors = [f"{name}: `{value['error']}`" for name, value in items.items() if "error" in value]
            missing = results[f"{leg}: not reached"]
            missing = [f"{len(missing)} items, which `gpu.json` names"] if len(missing) > 9 else missing
            parts += named("Errors", errors, "\n- ") + named("Not reached", missing, ", ")
    return "\n".join(parts)


def named(head: str, entries: Iterable[str], separator: str) -> list[str]:
    entries = list(entries)
    first = "\n- " if separator.startswith("\n") else " "
    return [f"{head}:{first}{separator.join(entries)}\n"] if entries else []


def correctness(items: Found) -> list[str]:
    """Returns how many checks hold by engine, with their largest difference; then each that does not hold."""
    groups: dict[str, Found] = {}
    for name, value in items.items():
        last = name.rpartition(", ")[2]
        if {"ok", "error"} & {*value}:
            groups.setdefault(last if last in ENGINES else "other checks", {})[name] = value
    lines: Lines = [["engine", "checks", "hold", "largest difference", "not held"]]
    for engine in (*ENGINES, "other checks"):
        checks = groups.get(engine, {})
        passed = [value for value in checks.values() if not is_failure(value)]
        most = max((value["difference"] for value in passed if "difference" in value), default=None)
        wrong = [f"**{name.removesuffix(f', {engine}')}**{reason(v)}" for name, v in checks.items() if is_failure(v)]
        if checks:
            lines.append([
                engine, str(len(checks)), str(len(passed)), "" if most is None else f"{most:.1e}", ", ".join(wrong)
            ])  # fmt: skip
    explained = (
        "Runs and measures in float64 against the CPU. A difference is relative to the largest entry of the server's"
        " vectors, or to the measure.\n"
    )
    precisions = ", ".join(
        f"{name.removeprefix('precision, ')} {value['difference']:.1e}"
        for name, value in items.items()
        if re.fullmatch("precision, [^,]*", name) and "difference" in value
    )
    notes = [f"Updates in another precision differ, relative to their length: {precisions}.\n"] if precisions else []
    return [explained, markdown(lines), *notes]


def reason(value: dict[str, Any]) -> str:
    """Returns what a failed check found, in brackets; nothing for an error, which is listed."""
    parts = [key for key, right in value.items() if right is False and key != "ok"]
    text = ", ".join(parts) or (f"{value['difference']:.1e}" if "difference" in value else "")
    return f" ({text})" if text and "error" not in value else ""


def speed(items: Found) -> list[str]:
    """Returns rates, next to a plain loop in the same format and to the floors; the same work stands together."""
    floors = items.get("floors", {})
    loops = {(v["work"], v["method"], v["form"]): v for v in items.values() if v.get("who") == PLAIN}
    body: Lines = []
    rows = [v for v in items.values() if v.get("who", PLAIN) != PLAIN]
    works = list(dict.fromkeys(map(what, rows)))
    for v in sorted(rows, key=lambda v: works.index(what(v))):
        plain = loops.get((v["work"], v["method"], v["form"])) or loops.get((v["work"], v["method"], "float32"), {})
        body.append([
            f"{v['work']}, {v['method']}" + (f", {v['seeds']} seeds" if v["seeds"] > 1 else ""), v["who"], v["form"],
            str(v["cohort"]), ms(v["round_s"]), ms(plain["round_s"]) if plain else "",
            f"{v['steps_per_s'] / plain['steps_per_s']:.2f}" if plain else "",
            share(flops_s(v, plain, floors), v), f"{v['peak_gb']:.2f}" if "peak_gb" in v else "",
        ])  # fmt: skip
    head = [
        "work", "who", "format", "cohort", "ms a round", "ms of the plain loop", "times as fast", "of the FLOP floor",
        "peak GiB",
    ]  # fmt: skip
    explained = (
        "The plain loop is that of the same format, or of float32 if there is none, with one seed; *times as fast*"
        " compares local steps a second. The FLOP floor is the time of a round's FLOPs at the rate of a large product."
        " `gpu.json` has the rates of launches and products.\n"
    )
    return [explained, markdown([head, *body])]


def what(v: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what rows that stand together measure."""
    return v["work"], v["method"], v["seeds"], v["cohort"]


def ms(seconds: float) -> str:
    """Returns milliseconds, to three digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):g}"


def flops_s(v: dict[str, Any], plain: dict[str, Any], floors: dict[str, Any]) -> float | None:
    rate = floors.get(f"{v['form']}_flops")
    return plain["step_flops"] * v["steps"] * v["cohort"] * v["seeds"] / rate if plain and rate else None


def share(floor: float | None, v: dict[str, Any]) -> str:
    return "" if floor is None else f"{floor / v['round_s']:.0%}"


def science(items: Found) -> list[str]:
    """Returns runs in the leg's order, next to those of the ledger on a CPU, and to the papers' numbers."""
    head = [
        "run", "rounds", "accuracy", "on the CPU", "lambda_max", "on the CPU",
        *(f"accuracy in {name}" for name in PAPERS), "lambda_max in FedGloSS", "ms a round",
    ]  # fmt: skip
    body: Lines = []
    for name, v in sorted(items.items(), key=lambda item: [*ROWS, item[0]].index(item[0])):
        if "rounds" not in v:  # it has ended before it could train
            continue
        cpu = ledger(name)
        measured = number(v, "flatness/lambda_max")
        if measured and not v["whole"]:
            measured += f" (round {v['flatness_round']})"
        body.append([
            name, f"{v['rounds']}{'' if v['whole'] else ', cut off'}", accuracy(v) or last_evaluations(v),
            accuracy(cpu), measured, number(cpu, "flatness/lambda_max"),
            *(printed(name, "alpha=0.05", table) for table in PAPERS.values()),
            printed(name, "alpha=0.05", {"paper": "fedgloss", "table": "8", "metric": "lambda_max"}),
            ms(v["seconds a round"]) if "seconds a round" in v else "",
        ])  # fmt: skip
    explained = (
        f"CIFAR-10, alpha 0.05, `HsuCNN`, 5 of 100 clients, seed {SEED}, {ROUNDS:,} rounds, bf16-mixed; the numbers of"
        " the papers are after 10,000 rounds. Accuracy in percent: mean and deviation over the last"
        f" {EVAL_LAST} rounds, or the mean of the last evaluations of a run that was cut off. On the CPU: the same"
        " settings in the repository's `ledger/cifar10`.\n"
    )
    return [explained, markdown([head, *body])]


def ledger(name: str) -> dict[str, Any]:
    """Returns the row of the ledger with the settings of a run; nothing if there is none."""
    return summary(read_run(*located(LEDGER / name / "seed_0")), ROUNDS, EVAL_LAST)


def accuracy(v: dict[str, Any]) -> str:
    return f"{v['accuracy'] * 100:.2f} ± {v['deviation'] * 100:.2f}" if "accuracy" in v else ""


def last_evaluations(v: dict[str, Any]) -> str:
    """Returns accuracy of a run that was cut off, with its rounds."""
    if "accuracy_of_last_evaluations" not in v:
        return ""
    rounds = v["rounds_of_last_evaluations"]
    return f"{v['accuracy_of_last_evaluations'] * 100:.2f} ({len(rounds)}, rounds {rounds[0]} to {rounds[-1]})"


def printed(algorithm: str, heterogeneity: str, table: dict[str, str]) -> str:
    """Returns a number of a paper's table, or nothing."""
    if table["paper"] == "fedgf":
        heterogeneity = PER_CLASS.get(heterogeneity, heterogeneity)
    fixed = {"dataset": "CIFAR10", "model": "HsuCNN", "participation": "5/100", "epochs": "1"}
    try:
        return find(**table, **fixed, algorithm=algorithm, heterogeneity=heterogeneity)[0].printed
    except UserError:
        return ""


def number(v: dict[str, Any], name: str) -> str:
    return f"{v[name]:.3g}" if name in v else ""
