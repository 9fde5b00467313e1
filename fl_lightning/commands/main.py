"""The command line: ``fl-lightning fit | centralized | test | flatness | landscape | plan | compare | ...``.

Importing torch and Lightning takes seconds, so only what needs them does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise

from fl_lightning import __version__
from fl_lightning.commands.messages import ArgumentsError, tell

COMMANDS = {
    "fit": "Train for trainer.max_rounds rounds.",
    "centralized": "Train on all clients' data at once: the papers' centralized references.",
    "validate": "Evaluate a model on the held-out part of the training data, or on all of them if none is.",
    "test": "Evaluate a model on the test set.",
    "flatness": "Measure the flatness of a checkpoint: Hessian, sharpness, discrepancy, drift.",
    "landscape": "Draw the loss around checkpoints: surfaces, planes, perturbations, local trajectories.",
    "interpolate": "Measure the loss on the line between two checkpoints, and its barrier.",
    "plan": "Predict hours, memory and bits of a fit, from a few rounds that are measured here.",
    "data": "Show how the samples are divided among the clients: table, CSV file, figures.",
    "corruptions": "Evaluate a model on CIFAR-10-C or CIFAR-100-C, by corruption and severity.",
    "compare": "Compare finished runs: statistics over seeds as table, CSV and LaTeX, and their curves.",
    "list": "Show the algorithms: paper, state, wire cost, passes.",
}
EPILOG = "Start with: fl-lightning fit --config configs/quickstart.yaml"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments; by default those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given in ([], ["-h"], ["--help"]):
        _help().print_help()
        sys.exit(0 if given else 2)
    if given == ["--version"]:
        print(__version__)
        return
    if given[0] not in COMMANDS:
        value = "missing" if given[0].startswith("-") else given[0]
        sys.exit(f"error: subcommand = {value}: choose from {', '.join(COMMANDS)}, or see --help")
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a cluster's time limit: save what is done, as Ctrl-C does
    sys.path.insert(0, "")  # a class of a file in the working folder can be named, as with `python -m`
    try:
        from fl_lightning.commands.cli import FederatedCLI

        FederatedCLI(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ArgumentsError, ValueError) as error:
        configs = [value for flag, value in pairwise(given) if flag in ("-c", "--config")]
        if (line := tell(error, configs)) is None:
            raise
        from fl_lightning.trainer.collectives import reports

        rank, telling = reports()
        sys.exit(f"error{f' (process {rank})' if rank else ''}: {line}" if telling else 1)


def _help() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fl-lightning", description="Federated learning with flat minima.", epilog=EPILOG)
    parser.add_argument("--version", action="store_true", help="Show the version.")
    commands = parser.add_subparsers(title="subcommands", metavar="{" + ",".join(COMMANDS) + "}")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=f"{summary} See {name} --help.")
    return parser
