"""What this package does on a GPU, in three legs: correctness, speed, science.

    python benchmarks/gpu.py --leg correctness --seconds 540 --device cuda

A leg does its items in order of value until its seconds are over, and writes ``--out`` after each. What is there is not
done again, so a leg that was cut short goes on where it stopped; what was not reached is listed. Items are done by
other processes, which are ended after their time: what crashes, hangs or breaks its device is an error in ``--out``,
with its last output in a file ``.log``, and the other items go on. ``--device cpu`` does the same in small, to try the
program. Arguments after ``--`` are those of ``fl-lightning fit`` in the last leg:

    python benchmarks/gpu.py --leg science --device cuda -- --data Arrays --data.path cifar10.npz

``--report docs/guides/gpu.md`` puts the tables of what is in ``--out`` between the page's comments ``<!-- gpu -->`` and
``<!-- /gpu -->``; ``--leg none`` does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from math import inf
from pathlib import Path

from legs.items import Results
from legs.workers import Leg, Task, fill

LEGS = {"correctness": Leg(jobs=8, seconds=180), "speed": Leg(jobs=1, seconds=120), "science": Leg(jobs=3, seconds=inf)}


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, fit = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leg", choices=(*LEGS, "all", "none"), default="all")
    parser.add_argument("--seconds", type=float, default=540.0, help="of a leg, after which no item begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/gpu.json"))
    parser.add_argument("--only", default="", help="items whose name contains this")
    parser.add_argument("--report", type=Path, help="page that gets the tables at the end")
    args = parser.parse_args(own)
    legs = {"all": list(LEGS), "none": []}.get(args.leg, [args.leg])
    if legs and args.device == "cuda" and not has_gpu():
        print("gpu.py: torch finds no CUDA device here; --device cpu runs every leg in small", file=sys.stderr)
        return 1
    failed = False
    try:
        for leg in legs:
            results = Results(args.out, leg, args.device)
            fill(results, Task(f"legs.{leg}", args.device, time.monotonic() + args.seconds, fit), LEGS[leg], args.only)
            failed |= bool(results.failed)
            print(results.text())
        if args.report:
            from legs.report import renew

            renew(args.report, args.device, Results(args.out, "", args.device).content.get(args.device))
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    return int(failed)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
