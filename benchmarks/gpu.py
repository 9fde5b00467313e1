"""What this package does on a GPU, in three legs: correctness, speed, science.

    python -m benchmarks.gpu correctness=130
    python -m benchmarks.gpu speed=180 science=230 -- --data Arrays --data.path cifar10.npz ...

A leg does its items in order of value for as many seconds, and gets what the legs before it leave; half a minute after
the sum of all seconds everything has ended. ``--out`` is written after each item. What is there is not done again, so a
leg that was cut short goes on where it stopped; what was not reached is listed. Items are done by other processes,
which are ended after their time: what crashes, hangs or breaks its device is an error in ``--out``, with its last
output in a file ``.log``, and the other items go on. ``--device cpu`` does the same in small, to try the program.
Arguments after ``--`` are those of ``fl-lightning fit`` in the last leg.

``--report docs/guides/gpu.md`` puts the tables of what is in ``--out`` between the page's comments ``<!-- gpu -->`` and
``<!-- /gpu -->``; without a leg it does nothing else. ``benchmarks/gpu.sh`` does it all on a machine lent for minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import accumulate
from math import inf
from pathlib import Path

from benchmarks.legs.items import Leg, Results, Task, fill, is_done

LEGS = {"correctness": Leg(jobs=8, seconds=90), "speed": Leg(jobs=1, seconds=60), "science": Leg(jobs=6, seconds=inf)}


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, fit = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("legs", nargs="*", type=leg, metavar="LEG=SECONDS", help=" or ".join(LEGS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/gpu.json"))
    parser.add_argument("--only", default="", help="items whose name has this regular expression")
    parser.add_argument("--join", type=Path, help="file of results that --out takes over first")
    parser.add_argument("--report", type=Path, help="page that gets the tables at the end")
    args = parser.parse_args(options)
    if args.legs and args.device == "cuda" and not has_gpu():
        print("gpu.py: torch finds no CUDA device here; --device cpu runs every leg in small", file=sys.stderr)
        return 1
    failed, started = False, time.monotonic()
    ends = accumulate((seconds for _, seconds in args.legs), initial=started)
    next(ends)
    if args.join:
        join(args.join, args.out)
    try:
        for (name, _), end in zip(args.legs, ends, strict=True):
            results = Results(args.out.absolute(), name)
            fill(results, Task(f"benchmarks.legs.{name}", args.device, end, results.path, fit), LEGS[name], args.only)
            failed |= bool(results.failed)
            print(results.text(), flush=True)
        if args.report:
            from benchmarks.legs.report import renew

            renew(args.report, Results(args.out, "").content)
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    return int(failed)


def join(new: Path, out: Path) -> None:
    """Puts the results of a file in place of those with the same machine, leg and item in another one."""
    content, added = (json.loads(path.read_text()) if path.exists() else {} for path in (out, new))
    for machine, parts in added.items():
        known = content.setdefault(machine, {})
        for name, part in parts.items():
            if name in LEGS:  # what was cut short replaces nothing that is whole
                old = known.get(name, {})
                part = {**old, **{item: v for item, v in part.items() if is_done(v) or not is_done(old.get(item))}}
            known[name] = part
        for name in LEGS:
            if missing := known.get(f"{name}: not reached"):
                missing[:] = [item for item in missing if not is_done(known[name].get(item))]
    out.write_text(json.dumps(content, indent=1) + "\n")


def leg(text: str) -> tuple[str, float]:
    """Parses a leg and its seconds."""
    name, _, seconds = text.partition("=")
    if name not in LEGS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(LEGS)}")
    return name, float(seconds)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
