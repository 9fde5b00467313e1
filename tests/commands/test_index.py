"""The index of the command line is that of the code, and what is answered from it is what the parser answers."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.commands.shared import early
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.commands.shared.configs import config_names
from fl_lightning.commands.shared.index import FILE, help_of, index
from fl_lightning.commands.shared.messages import ArgumentsError, explain
from fl_lightning.core import UserError


def test_the_index_is_that_of_the_code() -> None:
    # in a process of its own, since a help lists classes in the order in which they are imported
    command = [sys.executable, "-m", "tests.command_index", "--print"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    made, kept = json.loads(printed), json.loads(FILE.read_text(encoding="utf-8"))
    if made["made with"] != kept["made with"]:  # a help shows types as Python and jsonargparse write them
        for found in (made, kept):
            del found["made with"], found["texts"]
            for command in found["commands"].values():
                del command["help"]
    assert made == kept, "renew it: python -m tests.command_index"


def test_help_has_every_option() -> None:
    for name, command in index()["commands"].items():
        shown = help_of(name)
        assert shown.startswith(f"usage: fl-lightning {name}")
        assert all(f"--{option}" in shown for option in command["options"])


def line_of(function: object, *args: str) -> str | None:
    try:
        function(*args)  # type: ignore[operator]
    except (UserError, ArgumentsError) as error:
        return explain(error)
    return None


SLIPS = """
--model NoSuch
--model FedSam
--config quickstart --model FedSam
--config quickstart --model.ascent SAMM
--config quickstart --model=FedGF --model.ascent SAMM
--config quickstart --data Digit
--config quickstart --data.partition iid
--config quickstart --data.augment Nothing
--config quickstart --trainer.sampler Unifrom
--config quickstart --trainer.aggregation Foo
--config quickstart --trainer.privacy Foo
--config quickstart --trainer.max_round 3
--trainer.max_round=3
--trainer.tf3
--config quickstart --lr 0.1
--lr 0.1
--lr 0.1 --trainer.foo 3
--lr=0.1
--seed 1
--seed_everything 1
--config quickstart --model.lr 0.1
--config quickstart --model FedSAM --model.roh 0.1
--config quickstart --model FedSAM --model.ascent SAM
--config quickstart --model.optimizer Adam
--config quickstart --model.roh "it's"
--config quickstart --model.averagin=SWA
--config quickstart --data.alpha 0.1
quickstart
--config quickstart some thing
--config quickstart --max-rounds 3
--config nosuch
--config quickstrat
--config configs/nosuch.yaml
""".strip().splitlines()


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_name_is_refused_in_the_same_words(slip: str) -> None:
    args = ["fit", *shlex.split(slip)]
    found = line_of(early.check, *args)
    assert found is not None and found == line_of(FederatedCLI, *args)


PASSES = """
--config quickstart
--config quickstart --model FedSAM --model.rho 0.1 --trainer.max_rounds=3.0
--config quickstart --model my_methods.Mine --model.nothing 3 --model.ascent Other
--config quickstart --model.optimizer TorchOptimizer --model.optimizer.name Adam
--config quickstart --model.loss CrossEntropyLoss --model.net Linear
--config quickstart --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss
--config quickstart --trainer.loggers None --data.partition null
--config quickstart --model LocalObjective --model.ascent Ascent
--config quickstart --model.class_path FedAvg --model.init_args.relaxed_init 0.5
--config quickstart --model.parts '[{class_path: other.Part}]' --model.mine 3
--config quickstart --model fl_lightning.algorithms.fedsam.FedSAM --model.rho 0.1
--config quickstart --model.help=FedSAM
--config quickstart --values model.rho=0.1,0.2 --seeds 0,1
--config quickstart --print_config
--config here.yaml --model Mine
--model model
""".strip().splitlines()


@pytest.mark.parametrize("line", PASSES)
def test_the_rest_is_left_to_the_parser(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.yaml").write_text("model: my_methods.Mine  # a class of one's own\n")
    Path("model").write_text("class_path: FedAvg\n")  # a file is a setting's value, too
    early.check("fit", *shlex.split(line))


def test_every_config_passes() -> None:
    for name in config_names():
        if not name.startswith("sweeps/"):
            early.check("fit", f"--config={name}", "--trainer.max_rounds=3")
