"""What this package does on a GPU, in three legs: correctness, speed, science.

    python benchmarks/gpu.py --leg correctness --seconds 540 --device cuda

A leg does its items in order of value until its seconds are over, and writes ``--out`` after each. What is there is not
done again, so a leg that was cut short goes on where it stopped; what was not reached is listed. ``--device cpu`` does
the same in small, to try the program. Arguments after ``--`` are those of ``fl-lightning fit`` in the last leg:

    python benchmarks/gpu.py --leg science --device cuda -- --data Arrays --data.path cifar10.npz
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch
from legs.items import Results

LEGS = ("correctness", "speed", "science")


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, fit = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leg", choices=(*LEGS, "all"), default="all")
    parser.add_argument("--seconds", type=float, default=540.0, help="of a leg, after which no item begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default="", help="items whose name contains this")
    args = parser.parse_args(own)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; --device cpu runs every leg in small", file=sys.stderr)
        return 1
    failed = False
    for leg in LEGS if args.leg == "all" else [args.leg]:
        results = Results(args.out, leg, args.device, args.seconds)
        items = importlib.import_module(f"legs.{leg}").items(args.device, results, fit)
        failed |= results.fill({name: do for name, do in items.items() if args.only in name})
        print(results.text())
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
