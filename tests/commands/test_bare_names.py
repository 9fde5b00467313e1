"""Classes go by their bare names on the command line, in YAML and in sweeps, in a new process too."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fl_lightning
from fl_lightning.algorithms.parts.local_optimizer import Schedule
from fl_lightning.core import Checked
from tests.commands.test_sweep import file, table
from tests.runs import DIGITS, SCRIPT, last, newest, process

IN_LISTS = {
    "trainer.callbacks: {}": "--trainer.callbacks+={}",
    "trainer.loggers: {}": "--trainer.loggers+={}",
    "model.parts": "--model.parts=[{}]",
    "measure: {}": "--trainer.callbacks=[{{class_path: FlatnessMonitor, init_args: {{metrics: [{}]}}}}]",
}
"""Where classes of these places stand; those of the others are the setting of this name."""
EACH_IN_A_NEW_PROCESS = """
import json, sys
from fl_lightning.commands.shared.cli import FederatedCLI

parser = FederatedCLI("fit", "--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits").parser
before, wrong = {*sys.modules}, {}
for name, args in json.loads(sys.argv[1]).items():
    try:
        parser.parse_args(["--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits", *args])
    except Exception as error:
        if "are required" not in str(error):
            wrong[name] = str(error)
print(json.dumps([wrong, sorted(name for name in {*sys.modules} - before if name.startswith("fl_lightning"))]))
"""
"""No parsing imports a module that the next one would profit from; that is checked, too."""


def classes() -> dict[str, list[str]]:
    """Returns the arguments that name each class that a config can name."""
    exported = [getattr(fl_lightning, name) for name in fl_lightning.__all__]
    flags: dict[str, list[str]] = {}
    for kind in [*exported, *Schedule.__subclasses__()]:
        named = isinstance(kind, type) and issubclass(kind, Checked) and kind.__module__.startswith("fl_lightning.")
        if named and not inspect.isabstract(kind) and kind.config_key not in ("{}", "trainer"):
            flags[kind.__name__] = [IN_LISTS.get(kind.config_key, f"--{kind.config_key}={{}}").format(kind.__name__)]
    return {name: ["--trainer.faults=Faults", *args] if "faults." in args[0] else args for name, args in flags.items()}


@pytest.mark.long
def test_every_class_by_its_bare_name(tmp_path: Path) -> None:
    """A name that no import has made known is an error of the parser; missing arguments are no error of the name."""
    named = classes()
    assert {"AdaptivePrivacy", "GaussianPrivacy", "Cosine", "LoRA", "WandbLogger", "Updates", "FromFile"} <= {*named}
    assert len(named) > 100
    with process(sys.executable, "-c", EACH_IN_A_NEW_PROCESS, json.dumps(named), cwd=tmp_path) as child:
        out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    wrong, imported = json.loads(out.splitlines()[-1])
    assert wrong == {} and imported == []


ADAPTIVE = ["--model=FedAvg", "--model.weighting=uniform", "--trainer.privacy=AdaptivePrivacy"]
OPTIONS = {"noise_multiplier": 1.0, "delta": 0.1}
YAML: dict[str, Any] = {
    "model": {"class_path": "FedAvg", "init_args": {"weighting": "uniform"}},
    "trainer": {"privacy": {"class_path": "AdaptivePrivacy", "init_args": OPTIONS}},
}


@pytest.mark.long
@pytest.mark.parametrize("way", ["arguments", "yaml", "sweep"])
def test_adaptive_privacy_in_a_new_process(way: str, tmp_path: Path) -> None:
    """It trains, and the checkpoint has its clip."""
    (tmp_path / "private.yaml").write_text(yaml.safe_dump(YAML))
    settings = [*ADAPTIVE, *(f"--trainer.privacy.{name}={value}" for name, value in OPTIONS.items())]
    root = f"--trainer.default_root_dir={tmp_path}"
    args = {
        "arguments": ["fit", *settings, *DIGITS, root],
        "yaml": ["fit", "--config=private.yaml", *DIGITS, root],
        "sweep": ["sweep", "mine.yaml", f"--out={tmp_path}"],
    }[way]
    parameters = {"trainer.privacy": {"values": ["AdaptivePrivacy"]}, "trainer.privacy.clip": {"values": [0.1, 0.2]}}
    command = ["${env}", "fl-lightning", "fit", *settings, *DIGITS, "${args}"]
    file(tmp_path, parameters=parameters, command=command)
    with process(SCRIPT, *args, cwd=tmp_path) as child:
        _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    if way == "sweep":
        rows = table(tmp_path / "mine")
        assert [row["state"] for row in rows] == ["finished"] * 2
        folders = [Path(row["folder"]) for row in rows]
    else:
        folders = [newest(tmp_path)]
    for folder in folders:
        assert float(last(folder)["server"]["privacy_clip"]) > 0
