"""The command line: ``fl-lightning fit | centralized | test | flatness | landscape | plan | compare | ...``.

Importing torch and Lightning takes seconds. A command that neither trains nor builds a net does without. So do help,
completion, and wrong names of configs, classes and settings, which `fl_lightning.commands.shared.index` knows.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from inspect import signature
from io import TextIOWrapper
from typing import TYPE_CHECKING

from fl_lightning import __version__
from fl_lightning.commands import COMMANDS, function_of

if TYPE_CHECKING:
    from fl_lightning.commands.shared.parser import Command


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Arguments; by default those of the process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if "_ARGCOMPLETE" in os.environ:  # the process ends here
        import argcomplete

        argcomplete.autocomplete(_help(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:]))
    if arguments in ([], ["-h"], ["--help"]):
        _help().print_help()
        sys.exit(0 if arguments else 2)
    if arguments == ["--version"]:
        print(__version__)
        return
    if arguments[0] not in COMMANDS:
        value = "missing" if arguments[0].startswith("-") else arguments[0]
        near = get_close_matches(value.casefold(), COMMANDS, 1, 0.7)
        choice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}, or see --help"
        sys.exit(f"error: subcommand = {_visible(value)}: {choice}")
    if {"-h", "--help", "--help=all"} & {*arguments}:
        from fl_lightning.commands.shared.index import help_of

        try:
            print(help_of(arguments[0], full="--help=all" in arguments), end="")
        except ValueError as error:  # a subcommand that is newer than the index
            sys.exit(f"error: {error}")
        sys.exit(0)
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # a name may have letters that the terminal lacks, or be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    # classes in files of the working folder can be named; absolute, since a config is read from within its own folder
    try:
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        sys.exit("error: the working folder has been removed; change to another one")
    interruption = None
    try:
        from fl_lightning.commands.shared.arguments import joined
        from fl_lightning.commands.shared.index import ArgumentsError
        from fl_lightning.commands.shared.messages import explain, find_user_error
        from fl_lightning.commands.shared.parser import check_early
        from fl_lightning.trainer.runtime.signals import Interruption

        with (interruption := Interruption(ends_process=True)):
            if "torch" not in sys.modules:
                check_early(*arguments)
            command_of(*arguments).run()
    except KeyboardInterrupt:
        sys.exit(128 + ((interruption and interruption.received) or signal.SIGINT))
    except BrokenPipeError:  # as in `| head`: what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ModuleNotFoundError as error:
        if "lightning" in sys.modules:
            raise
        sys.exit(f"error: {error.name} is not installed for {sys.executable}; see Install in README.md")
    except (ArgumentsError, ValueError, OSError) as error:
        configs = [arg.removeprefix("--config=") for arg in joined(arguments) if arg.startswith("--config=")]
        if (line := explain(error, configs, arguments[0])) is None:
            raise
        from fl_lightning.results.terminal import wrapped
        from fl_lightning.trainer.runtime.signals import rank_and_first

        # those of processes that are connected, if torch has been imported
        collectives = sys.modules.get("fl_lightning.trainer.runtime.collectives")
        rank, first = collectives.reports() if collectives else rank_and_first()
        code = getattr(find_user_error(error), "exit_code", 1)
        text = wrapped(f"error{f' (process {rank})' if rank else ''}: {_visible(line)}", sys.stderr)
        if first and code != 1:
            print(text, file=sys.stderr)
        sys.exit(text if first and code == 1 else code)


def command_of(command: str, *args: str) -> "Command":
    """Returns a subcommand with its arguments, as FederatedCLI if it reads a config.

    Args:
        command: Its name.
        args: Its arguments.
    """
    from fl_lightning.commands.shared.index import PARTS
    from fl_lightning.commands.shared.parser import Command

    if {"cli", *PARTS} & {*signature(function_of(command)).parameters}:
        from fl_lightning.commands.shared.cli import FederatedCLI

        return FederatedCLI(command, *args)
    return Command(command, *args)


def _visible(line: str) -> str:
    """Returns a line with newlines, a terminal's codes and broken characters, as in the name of a file, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _help(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns a parser of the subcommands; of the first of some words, if others follow, it has the options."""
    parser = argparse.ArgumentParser(
        "fl-lightning",
        description="Federated learning with flat minima.",
        epilog="Start with: fl-lightning fit --config quickstart",
    )
    parser.add_argument("--version", action="store_true", help="Show the version.")
    commands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=f"{summary} See {name} --help.", conflict_handler="resolve")
        if words[1:] and words[0] == name:
            from fl_lightning.commands.shared.parser import add_options

            add_options(subparser, name, words[1:])
    return parser
