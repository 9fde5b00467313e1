"""The command line: its subcommands.

A subcommand is ``run`` in a module of its name here, or another function in `PLACES`. The command line is made of the
parameters of the function:

- ``trainer``, ``model``, ``data``: built from the config.
- ``cli``: the `FederatedCLI` itself, for a command that builds trainers with settings of its own.
- Other parameters before a ``/`` are positional arguments, the rest options; types, defaults and help come from the
  annotations and the docstring.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

COMMANDS = {
    "centralized": "Train on all clients' data at once: the papers' centralized references.",
    "compare": "Compare finished runs: statistics over seeds as table, CSV and LaTeX, and their curves.",
    "configs": "List the configs that come with the package; --config takes their names.",
    "corruptions": "Evaluate a model on CIFAR-10-C or CIFAR-100-C, by corruption and severity.",
    "data": "Show how the samples are divided among the clients: table, CSV file, heat map.",
    "export": "Write the net of a checkpoint, weights and running statistics, as a state_dict.",
    "fit": "Train for trainer.max_rounds rounds.",
    "flatness": "Measure the flatness of a checkpoint: Hessian, sharpness, discrepancy, drift.",
    "flower": "Write a Flower app: the run on a server, its clients on other machines.",
    "init": "Write a folder to start from: a config, an algorithm of your own, a sweep, a README.",
    "interpolate": "Measure the loss on the line between two checkpoints, and its barrier.",
    "landscape": "Draw the loss around checkpoints: surfaces, planes, perturbations, local trajectories.",
    "list": "Show the algorithms: paper, state, wire cost, passes.",
    "plan": "Predict hours, memory and bits of a fit, from a few rounds that are measured here.",
    "report": "Write a report of runs: one HTML page that opens offline, with its tables and figures beside it.",
    "reproduce": "Reproduce a paper's table or figure: make its runs, print our numbers beside the paper's, "
    "or draw it.",
    "runs": "List runs with state, rounds, headline, time and size; follow those that train, or delete some.",
    "study": "Keep finished runs as rows of a study; train rows again and compare their bits; write its pages.",
    "sweep": "Run a sweep in W&B's format here: grid, random or bayes, resumable, with the best config.",
    "test": "Evaluate a model on the test set.",
    "validate": "Evaluate a model on the held-out part of the training data, or on all of it if none is held out.",
}
"""The subcommands, and their lines in ``fl-lightning --help``."""
PLACES = {
    "centralized": "fit.centralized",
    "init": "configs.init",
    "interpolate": "landscape.line",
    "list": "configs.algorithms",
    "test": "fit.test",
    "validate": "fit.validate",
}
"""Module and function of the subcommands that have no module of their own."""


def function_of(command: str) -> Callable[..., Any]:
    """Returns the function of a subcommand."""
    module, _, name = PLACES.get(command, f"{command}.run").partition(".")
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return function
