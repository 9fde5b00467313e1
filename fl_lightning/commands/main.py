"""The command line: ``fl-lightning fit | centralized | test | flatness | landscape | plan | compare | ...``.

Importing torch and Lightning takes seconds, so ``--help``, ``--version`` and a wrong subcommand do without.
"""

import argparse
import ast
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from fl_lightning import __version__


def _summaries() -> dict[str, str]:
    """Returns the summary of each subcommand: of each file of this folder that defines ``SUMMARY``."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            match line:
                case ast.Assign([ast.Name("SUMMARY")], value):
                    found[path.stem] = ast.literal_eval(value)
    return found


COMMANDS = _summaries()
"""The subcommands and their summaries."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Arguments; by default those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    if "_ARGCOMPLETE" in os.environ:
        given = _complete()
    if given in ([], ["-h"], ["--help"]):
        _help().print_help()
        sys.exit(0 if given else 2)
    if given == ["--version"]:
        print(__version__)
        return
    if given[0] not in COMMANDS:
        value = "missing" if given[0].startswith("-") else given[0]
        sys.exit(f"error: subcommand = {value}: choose from {', '.join(COMMANDS)}, or see --help")
    # classes in files of the working folder can be named; absolute, since a config is read from within its own folder
    sys.path.insert(0, os.getcwd())
    interruption = None
    try:
        from fl_lightning.commands.cli import FederatedCLI
        from fl_lightning.commands.messages import ArgumentsError, explain, find_user_error
        from fl_lightning.core import Interruption

        with (interruption := Interruption(ends_process=True)):
            FederatedCLI(*given).run()
    except KeyboardInterrupt:
        sys.exit(128 + ((interruption and interruption.received) or signal.SIGINT))
    except (ArgumentsError, ValueError) as error:
        flags = [(*arg.partition("=")[::2], after) for arg, after in pairwise([*given, ""])]
        configs = [value or after for flag, value, after in flags if flag in ("-c", "--config")]
        if (line := explain(error, configs)) is None:
            raise
        from fl_lightning.trainer.collectives import reports

        rank, first = reports()
        mistake = find_user_error(error)
        if not first:
            sys.exit(1 if mistake is None else mistake.exit_code)
        text = f"error{f' (process {rank})' if rank else ''}: {line}"
        if mistake is None or mistake.exit_code == 1:
            sys.exit(text)
        print(text, file=sys.stderr)
        sys.exit(mistake.exit_code)


def _complete() -> list[str]:
    """Completes a subcommand for argcomplete; of a whole one, returns its name, whose parser completes what follows."""
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:]
    if len(words) < 2 or words[0] not in COMMANDS:
        argcomplete.autocomplete(_help())  # ends the process
    os.environ["_ARGCOMPLETE"] = "2"  # words that are not the parser's
    return words[:1]


def _help() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fl-lightning",
        description="Federated learning with flat minima.",
        epilog="Start with: fl-lightning fit --config quickstart",
    )
    parser.add_argument("--version", action="store_true", help="Show the version.")
    commands = parser.add_subparsers(title="subcommands", metavar="{" + ",".join(COMMANDS) + "}")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=f"{summary} See {name} --help.")
    return parser
