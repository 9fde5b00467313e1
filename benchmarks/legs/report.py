"""Tables of all that gpu.json holds, for a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError
from fl_lightning.results.metrics import markdown
from fl_lightning.results.papers import find
from legs.items import is_failure

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
Found = dict[str, dict[str, Any]]
Lines = list[list[str]]


def renew(page: Path, device: str, found: dict[str, Any] | None) -> None:
    """Puts the tables between the comments of a page.

    Raises:
        ValueError: If there are no results, or the page has no place for them.
    """
    text = page.read_text()
    if not found:
        raise ValueError("there is nothing to report: run a leg first, or name its file with --out")
    if not BLOCK.search(text):
        raise ValueError(f"{page} has no comments <!-- gpu --> and <!-- /gpu --> to put the tables between")
    head = "Measured" if device == "cuda" else "In small, to try the program"
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}\n## {head}: {section(found)}\n{match[2]}", text))


def section(found: dict[str, Any]) -> str:
    """The results of one machine."""
    machine = found["machine"]
    about = ", ".join(
        f"{name} {machine[key]}" for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("Python", "python"))
    )
    parts = [f"{machine['device']}\n\n{about}.\n"]
    for leg, tables in (("correctness", correctness), ("speed", speed), ("science", science)):
        if items := found.get(leg):
            parts += [f"### {leg.capitalize()}\n", *tables(items)]
            errors = [f"{name}: `{value['error']}`" for name, value in items.items() if "error" in value]
            parts += named("Errors", errors, "\n- ") + named("Not reached", found[f"{leg}: not reached"], ", ")
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
    units = [["", "a second"], *([name.removesuffix("_per_s"), f"{v:.3g}"] for name, v in floors.items() if v > 1e3)]
    explained = (
        "The plain loop is that of the same format, and float32 for bf16. The launch floor is the time of as many small"
        " operations as its step has: for each client in turn (plain loop, sequential), for all at once (batched), in a"
        " CUDA graph (graphed). The FLOP floor is the time of its FLOPs at the rate of a large product.\n"
    )
    return [*([markdown(units)] if floors else []), explained, markdown([head, *body])]


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
    """Runs next to the papers' numbers."""
    head = ["run", "rounds", "accuracy", *(f"in {name}" for name in PAPERS), "lambda_max", "in FedGloSS", "discrepancy"]
    body: Lines = []
    for name, v in items.items():
        if "error" in v:
            continue
        algorithm, *setting = name.split(", ")
        heterogeneity = setting[0].replace(" ", "=") if setting else ""
        accuracy = f"{v['accuracy'] * 100:.2f} ± {v['deviation'] * 100:.2f}" if "accuracy" in v else ""
        body.append([
            name, f"{v['rounds']}{'' if v['whole'] else ', goes on'}", accuracy,
            *(printed(algorithm, heterogeneity, where) for where in PAPERS.values()),
            number(v, "flatness/lambda_max"),
            printed(algorithm, heterogeneity, {"paper": "fedgloss", "table": "8", "metric": "lambda_max"}),
            number(v, "flatness/discrepancy"),
        ])  # fmt: skip
    explained = (
        "CIFAR-10, `HsuCNN`, 5 of 100 clients. Accuracy in percent: mean and deviation of the last 100 evaluations,"
        " which are those of the last 100 rounds where all 10,000 are done, as in the papers.\n"
    )
    return [explained, markdown([head, *body])]


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
