"""CONTRIBUTING's steps, as they stand, take a new algorithm into the package: a copy of the repository is green."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_readme import ROOT, clone

ALGORITHM = '''"""FedLeash."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import Gradient, Step
from fl_lightning.core import ClientContext, NonNegative, State


class FedLeash(LocalObjective):
    """FedAvg with a pull towards the model of the round that is never longer than ``mu``.

    Args:
        net: The network.
        mu: The pull's largest norm.
        **kwargs: As for `LocalObjective`.
    """

    paper = "of this test"
    refers_to_received = True

    def __init__(self, net: nn.Module, mu: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g + mu (w - w^t) / (1 + ||w - w^t||)``."""
        away = w - client.start
        pull = self.mu * away / (1 + away.norm(dim=-1, keepdim=True))
        return self.local_gradient(w, grad, client, received, ctx) + pull, client
'''
BOX = '''

def fedleash(P: Problem, mu: float) -> Models:
    """FedLeash."""
    w = [P.w0]
    for t, S in P.rounds():

        def d(v: Tensor, k: int, t: int = t) -> Tensor:
            return P.g(k, v) + mu * (v - w[t]) / (1 + (v - w[t]).norm())

        w.append(P.mean({k: P.sgd(t, k, w[t], lambda v, k=k: d(v, k)) for k in S}))
    return w
'''
CASE = '    "FedLeash": (lambda P: boxes.fedleash(P, 0.3), lambda **k: fl.FedLeash(mu=0.3, **k)),\n'
CONFIG = """model: {class_path: FedLeash, init_args: {net: DigitsMLP, mu: 0.1}}
data: Digits
trainer: {max_rounds: 20, clients_per_round: 10}
"""
TEST = """from fl_lightning import FedAvg, FedLeash
from tests.problem import Golden
from tests.runs import assert_same


def test_a_leash_of_no_strength_is_fedavg(golden: Golden) -> None:
    leash, _ = golden.run(FedLeash(golden.net(), mu=0))
    assert_same(leash.server, golden.run(FedAvg(golden.net()))[0].server)
"""
MAKE = f"make VENV={sys.prefix} -o {sys.prefix}/.installed-dev"
HOUSE = [
    "tests/algorithms/test_fedleash.py",
    "tests/commands/test_index.py",
    "tests/core/test_lazy.py",
    "tests/core/test_options.py",
    "tests/integration/test_docs.py",
    "tests/trainer/test_asynchronous.py::test_which_algorithms_need_rounds",
]
"""What holds the package together; files in which a test has the algorithm's name in its own are run by that name."""


def add(folder: Path, file: str, text: str, before: str = "") -> None:
    """Adds a text to a file, in front of one that it has, or at its end."""
    old = (folder / file).read_text() if (folder / file).exists() else ""
    assert before in old, file
    position = old.index(before) if before else len(old)
    (folder / file).write_text(old[:position] + text + old[position:])


@pytest.mark.long
def test_the_steps_take_a_new_algorithm_in(tmp_path: Path) -> None:
    clone(tmp_path)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    (page,) = re.findall(r"^````md\n(.*?)^````", contributing, re.DOTALL | re.MULTILINE)
    page = page.replace("FedProx", "FedLeash").replace("fedprox", "fedleash")
    # 1
    add(tmp_path, "fl_lightning/algorithms/fedleash.py", ALGORITHM)
    add(tmp_path, "fl_lightning/algorithms/__init__.pyi", "from .fedleash import FedLeash as FedLeash\n", "\n__all__")
    add(tmp_path, "fl_lightning/__init__.pyi", "from .algorithms import FedLeash as FedLeash\n", "from .algorithms")
    # 2
    add(tmp_path, "tests/algorithms/test_fedleash.py", TEST)
    add(tmp_path, "tests/integration/boxes.py", BOX)
    add(tmp_path, "tests/integration/test_boxes.py", CASE, '    "FedProx": (')
    # 3, 4
    add(tmp_path, "configs/fedleash.yaml", CONFIG)
    add(tmp_path, "docs/references.md", "| FedLeash | A test of this package. |\n", "| FedACG | ")
    add(tmp_path, "docs/algorithms/fedleash.md", page)
    # 5, 6
    run(f"{MAKE} format renew lint", tmp_path)
    run(f"{sys.executable} -m pytest {' '.join(HOUSE)} -m 'not slow'", tmp_path)
    run(
        f"{sys.executable} -m pytest tests -k 'FedLeash or fedleash or says_what_the_code_says or index_is_that'",
        tmp_path,
    )


def run(command: str, folder: Path) -> None:
    """Runs a command in the copy, whose package is imported."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, f"{command}\n{process.stdout[-5000:]}{process.stderr[-3000:]}"
