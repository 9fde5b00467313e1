"""What a run folder keeps of code, machine and command, and of the partition."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fl_lightning
from fl_lightning import Digits, UserError
from fl_lightning.trainer.storage import provenance
from tests.runs import assert_same, last, metrics, run, state


def written(folder: Path, **options: Any) -> dict[str, Any]:
    provenance.write(folder, 0, torch.device("cpu"), 1, **{"engine": "sequential", "precision": "32-true", **options})
    content: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return content


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit as the working folder."""
    folder = tmp_path / "clone"
    (folder / "package").mkdir(parents=True)
    for name in ("mine.py", "package/mine.py"):
        (folder / name).write_text("a = 1\n")
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    for args in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(folder), *args], check=True)
    monkeypatch.chdir(folder)
    return folder


def test_a_run_and_its_resumption(tmp_path: Path) -> None:
    reference = run("fit", "--trainer.max_rounds=4", root=tmp_path / "whole")
    resumed = run("fit", root=tmp_path / "part")
    run("fit", "--trainer.max_rounds=4", "--ckpt_path=last", root=tmp_path / "part")
    first, second = json.loads((resumed / "provenance.json").read_text())["starts"]
    assert (first["round"], second["round"], last(resumed)["round"]) == (0, 2, 4)
    assert first["engine"] == "sequential" and first["precision"] == "32-true"
    assert "--trainer.max_rounds=2" in first["command"] and "--ckpt_path=last" in second["command"]
    assert first["versions"]["torch"] == torch.__version__.partition("+")[0]
    machine = first["machine"]
    assert machine["threads"] == 1 and machine["processes"] == 1 and machine["device"] == "cpu" and machine["cpu"]
    assert socket.gethostname() not in json.dumps(machine)
    assert_same(state(resumed), state(reference))
    assert metrics(resumed) == metrics(reference)
    partition = json.loads((resumed / "partition.json").read_text())
    assert (partition["clients"], partition["classes"]) == (6, 10) and len(partition["counts"]) == 6


def test_it_draws_no_random_number(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    written(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_commit_and_changes(clone: Path, tmp_path: Path) -> None:
    """They are those of the working folder; the same changes are kept once, others beside them."""
    out = tmp_path / "run"
    out.mkdir()
    clean = written(out)["starts"][0]["code"]["working folder"]
    assert len(clean["commit"]) == 40 and clean["changes"] is None and clean["unknown_files"] == []
    (clone / "mine.py").write_text("a = 2\n")
    (clone / "new.py").write_text("b = 1\n")
    written(out)
    content = written(out)
    one, two = (start["code"]["working folder"] for start in content["starts"][1:])
    assert one == two and one["unknown_files"] == ["new.py"]
    assert "-a = 1\n+a = 2\n" in content["changes"][one["changes"]]
    (clone / "mine.py").write_text("x\n" * provenance.MOST_CHANGES)
    content = written(out)
    text = content["changes"][content["starts"][-1]["code"]["working folder"]["changes"]]
    assert text.endswith("characters\n") and len(text) < provenance.MOST_CHANGES + 100
    assert one["changes"] in content["changes"]


def test_code_of_the_package_is_what_was_imported(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fl_lightning, "__file__", str(clone / "mine.py"))
    monkeypatch.setattr(provenance, "package", cache(provenance.package.__wrapped__))
    (clone / "mine.py").write_text("a = 2\n")
    first = written(tmp_path)["starts"][0]["code"]
    (clone / "mine.py").write_text("a = 3\n")
    content = written(tmp_path)
    second = content["starts"][1]["code"]
    assert first["package"] == first["working folder"] == second["package"] != second["working folder"]
    assert len(content["changes"]) == 2 and first["package"]["changes"] in content["changes"]


def test_code_of_the_package_is_that_of_its_folder(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger beside it, say, is no code of the package."""
    monkeypatch.setattr(fl_lightning, "__file__", str(clone / "package" / "mine.py"))
    monkeypatch.setattr(provenance, "package", cache(provenance.package.__wrapped__))
    (clone / "mine.py").write_text("a = 2\n")
    code = written(tmp_path)["starts"][0]["code"]
    assert code["package"]["changes"] is None and code["working folder"]["changes"]


def test_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert written(tmp_path)["starts"][0]["code"]["working folder"] is None
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.setattr(provenance, "package", provenance.package.__wrapped__)  # as in a new process
    assert written(tmp_path)["starts"][1]["code"] == {"working folder": None, "package": None}


def test_no_secrets(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "out of the environment")
    args = ["fit", "--x.api_key=s3cret", "--token", "s3cret", "--y={'access_key': 's3cret'}", "--monkey=1", "a b"]
    monkeypatch.setattr(provenance, "package", lambda: None)  # this file may have changes, too
    (clone / "mine.py").write_text('wandb.login(key="s3cret")\n')
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/fl-lightning", *args])
    command = written(tmp_path)["starts"][0]["command"]
    assert command == "fl-lightning fit '--x.api_key=***' --token '***' '--y=***' --monkey=1 'a b'"
    text = (tmp_path / "provenance.json").read_text()
    assert "s3cret" not in text and "out of the environment" not in text and "/home/me" not in text
    monkeypatch.setattr(sys, "argv", ["/x/fl_lightning/__main__.py", "fit"])
    assert provenance.command_line() == "python -m fl_lightning fit"


@pytest.mark.parametrize(
    "text", ["{cut", "[" * 100_000, '{"starts": null, "changes": {}}', '{"starts": "x", "changes": {}}',
             '{"starts": [5], "changes": {}}', '{"starts": [], "changes": "x"}'],
)  # fmt: skip
def test_an_unreadable_file_is_not_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(UserError, match=r"provenance\.json: not (readable|what a run writes).*; restore or remove it$"):
        written(tmp_path)
    assert (tmp_path / "provenance.json").read_text() == text


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path)
    path, draw = tmp_path / "provenance.json", random.Random(5)
    content = path.read_bytes()
    for place in draw.choices(range(len(content)), k=200):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"provenance\.json: not (readable|what a run writes|as the run has)"):
            written(tmp_path)
    path.write_bytes(content)
    assert len(written(tmp_path)["starts"]) == 3


def test_partitions_are_bounded(tmp_path: Path) -> None:
    data = Digits(num_clients=1200)
    data.setup()
    provenance.write_partition(tmp_path, data)
    partition = json.loads((tmp_path / "partition.json").read_text())
    assert (partition["clients"], len(partition["counts"])) == (1200, 1000)
    label = str(int(data.y_train[data.clients[0][0]]))
    assert sum(partition["counts"][0].values()) == len(data.clients[0]) and label in partition["counts"][0]
