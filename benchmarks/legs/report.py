"""Tables of all that gpu.json holds, for a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError
from fl_lightning.results.metrics import markdown, read_run
from fl_lightning.results.papers import find
from fl_lightning.results.rows import located
from legs.items import is_failure
from legs.science import EVAL_LAST, ROUNDS, SEED, summary

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
LEDGER_ROWS = {"FedGloSS+SAM": "FedGloSS"}
"""Rows of the ledger that have another name than the run."""
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
    sections = "\n".join(section(found) for found in content.values())
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}\n{sections}\n{match[2]}", text))


def section(found: dict[str, Any]) -> str:
    """The results of one machine."""
    machine = found["machine"]
    about = ", ".join(
        f"{name} {machine[key]}" for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("Python", "python"))
    )
    head = "Measured" if machine["kind"] == "cuda" else "In small, to try the program"
    parts = [f"## {head}: {machine['device']}\n\n{about}.\n"]
    for leg, tables in (("correctness", correctness), ("speed", speed), ("science", science)):
        if items := found.get(leg):
            parts += [f"### {leg.capitalize()}\n", *tables(items)]
            errors = [f"{name}: `{value['error']}`" for name, value in items.items() if "error" in value]
            missing = found[f"{leg}: not reached"]
            more = [f"and {len(missing) - 8} more, which `gpu.json` names"] if len(missing) > 9 else []
            parts += named("Errors", errors, "\n- ") + named(
                "Not reached", [*missing[: 8 if more else None], *more], ", "
            )
    return "\n".join(parts)


def named(head: str, things: Iterable[str], between: str) -> list[str]:
    things = list(things)
    first = "\n- " if between.startswith("\n") else " "
    return [f"{head}:{first}{between.join(things)}\n"] if things else []


def correctness(items: Found) -> list[str]:
    """Algorithms by engine; then the other checks."""
    rows: dict[str, dict[str, str]] = {}
    others: Lines = [["check", "difference", "verdict"]]
    for name, value in items.items():
        first, _, last = name.rpartition(", ")
        if last in ENGINES and first != "resume":
            rows.setdefault(first, {})[last] = verdict(value, difference(value))
        elif "error" not in value:
            parts = [key for key, right in value.items() if right is False and key != "ok"]
            said = "" if "ok" not in value else ", ".join(parts) or ("holds" if value["ok"] else "wrong")
            others.append([name, difference(value), verdict(value, said)])
    lines = [[name, *(of.get(engine, "") for engine in ENGINES)] for name, of in rows.items()]
    explained = (
        "Differences to the CPU are the largest ones, relative to the largest entry of the server's vectors or to the"
        " measure; those of a precision are of the whole update. What is wrong is bold.\n"
    )
    return [explained, markdown([["float64", *ENGINES], *lines]), markdown(others)]


def difference(value: dict[str, Any]) -> str:
    return "error" if "error" in value else f"{value['difference']:.1e}" if "difference" in value else ""


def verdict(value: dict[str, Any], text: str) -> str:
    return f"**{text}**" if is_failure(value) else text


def speed(items: Found) -> list[str]:
    """Rates, next to a plain loop in the same format and to the floors."""
    floors = items.get("floors", {})
    loops = {(v["work"], v["method"], v["form"]): v for v in items.values() if v.get("who") == PLAIN}
    body: Lines = []
    for v in items.values():
        if "who" not in v:
            continue
        plain = loops.get((v["work"], v["method"], v["form"])) or loops.get((v["work"], v["method"], "float32"), {})
        body.append([
            v["work"], v["method"], v["who"], v["form"], str(v["cohort"]), str(v["seeds"]),
            f"{v['round_s'] * 1e3:.3g}", f"{v['steps_per_s']:.4g}", f"{v['clients_per_s']:.4g}",
            f"{v['steps_per_s'] / plain['steps_per_s']:.2f}" if plain else "",
            share(launches_s(v, plain, floors), v), share(flops_s(v, plain, floors), v),
            f"{v['peak_gb']:.2f}" if "peak_gb" in v else "", f"{v['first_s']:.1f}" if "first_s" in v else "",
        ])  # fmt: skip
    head = [
        "work", "method", "who", "format", "cohort", "seeds", "ms a round", "local steps/s", "clients/s",
        "times the plain loop", "of the launch floor", "of the FLOP floor", "peak GiB", "start, s",
    ]  # fmt: skip
    rated = {name: v for name, v in floors.items() if name.endswith(("_per_s", "_flops"))}
    units = [["", "a second"], *([name.removesuffix("_per_s"), f"{v:.3g}"] for name, v in rated.items())]
    explained = (
        "The plain loop is that of the same format, or of float32 if there is none. The launch floor is the time of as"
        " many small operations as its step has: for each client in turn (plain loop, sequential), for all at once"
        " (batched), in a CUDA graph (graphed). The FLOP floor is the time of its FLOPs at the rate of a large product."
        "\n"
    )
    forms = convolutions(items.get("conv_forms", {}))
    return [*([markdown(units)] if rated else []), *forms, explained, markdown([head, *body])]


def convolutions(found: dict[str, Any]) -> list[str]:
    """TFLOP/s of a convolution of several clients: settings by form."""
    rates = {tuple(key.split("; ")): v for key, v in found.items() if "; " in key}
    if not rates:
        return []
    names, settings = (list(dict.fromkeys(key[i] for key in rates)) for i in (0, 1))
    shown = {key: f"{v:.3g}" if v else "fails" for key, v in rates.items()}
    lines = [[setting, *(shown.get((name, setting), "") for name in names)] for setting in settings]
    explained = (
        'A convolution, 5x5 with 64 channels, forward and backward, in a CUDA graph; "groups" is what vmap does.\n'
    )
    return [explained, markdown([["TFLOP/s", *names], *lines])]


def launches_s(v: dict[str, Any], plain: dict[str, Any], floors: dict[str, Any]) -> float | None:
    """Seconds to launch the operations of a round; None if unknown, as of compiled code."""
    rate = floors.get("graphed_launches_per_s" if v["who"] == "graphed" else "launches_per_s")
    if not plain or rate is None or v["who"] not in (PLAIN, "sequential", "batched", "graphed"):
        return None
    in_turn = v["cohort"] if v["who"] in (PLAIN, "sequential") else 1
    return float(plain["step_operations"] * v["steps"] * in_turn / rate)


def flops_s(v: dict[str, Any], plain: dict[str, Any], floors: dict[str, Any]) -> float | None:
    rate = floors.get(f"{v['form']}_flops")
    return plain["step_flops"] * v["steps"] * v["cohort"] * v["seeds"] / rate if plain and rate else None


def share(floor: float | None, v: dict[str, Any]) -> str:
    return "" if floor is None else f"{floor / v['round_s']:.0%}"


def science(items: Found) -> list[str]:
    """Runs next to those of the ledger on a CPU, and to the papers' numbers."""
    head = [
        "run", "rounds", "accuracy", "on the CPU", "of the last evaluations, not comparable", "lambda_max",
        "on the CPU", *(f"accuracy in {name}" for name in PAPERS), "lambda_max in FedGloSS", "engine", "ms a round",
    ]  # fmt: skip
    body: Lines = []
    for name, v in items.items():
        if "rounds" not in v:  # it has ended before it could train
            continue
        cpu = ledger(name)
        measured = number(v, "flatness/lambda_max")
        if measured and not v["whole"]:
            measured += f" (round {v['flatness_round']})"
        body.append([
            name, f"{v['rounds']}{'' if v['whole'] else ', cut off'}", accuracy(v), accuracy(cpu), last_evaluations(v),
            measured, number(cpu, "flatness/lambda_max"),
            *(printed(name, "alpha=0.05", where) for where in PAPERS.values()),
            printed(name, "alpha=0.05", {"paper": "fedgloss", "table": "8", "metric": "lambda_max"}),
            v.get("engine", ""), f"{v['seconds a round'] * 1e3:.3g}" if "seconds a round" in v else "",
        ])  # fmt: skip
    explained = (
        f"CIFAR-10, alpha 0.05, `HsuCNN`, 5 of 100 clients, seed {SEED}, {ROUNDS:,} rounds, bf16-mixed; the numbers of"
        " the papers are after 10,000 rounds. Accuracy in percent: mean and deviation over the last"
        f" {EVAL_LAST} rounds, all evaluated, of runs that are whole. A run that was cut off has the mean of its last"
        " evaluations in a column of its own. On the CPU: the same settings in the repository's `ledger/cifar10`.\n"
    )
    return [explained, markdown([head, *body])]


def ledger(name: str) -> dict[str, Any]:
    """The row of the ledger with the settings of a run; nothing if there is none."""
    return summary(read_run(*located(LEDGER / LEDGER_ROWS.get(name, name) / "seed_0")), ROUNDS, EVAL_LAST)


def accuracy(v: dict[str, Any]) -> str:
    return f"{v['accuracy'] * 100:.2f} ± {v['deviation'] * 100:.2f}" if "accuracy" in v else ""


def last_evaluations(v: dict[str, Any]) -> str:
    """Accuracy of a run that was cut off, with its rounds."""
    if "accuracy_of_last_evaluations" not in v:
        return ""
    rounds = v["rounds_of_last_evaluations"]
    return f"{v['accuracy_of_last_evaluations'] * 100:.2f} ({len(rounds)}, rounds {rounds[0]} to {rounds[-1]})"


def printed(algorithm: str, heterogeneity: str, where: dict[str, str]) -> str:
    """A number of a paper's table, or nothing."""
    if where["paper"] == "fedgf":
        heterogeneity = PER_CLASS.get(heterogeneity, heterogeneity)
    fixed = {"dataset": "CIFAR10", "model": "HsuCNN", "participation": "5/100", "epochs": "1"}
    try:
        return find(**where, **fixed, algorithm=algorithm, heterogeneity=heterogeneity)[0].printed
    except UserError:
        return ""


def number(v: dict[str, Any], name: str) -> str:
    return f"{v[name]:.3g}" if name in v else ""
