"""Clients on nodes: the trainer's weights and states to the bit, the declared wire, failures on either side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fl_lightning import UserError
from fl_lightning.flower.messages import Message, row_of, version_in, version_of
from tests.flower.nodes import Nodes, build, trained
from tests.runs import assert_same, cli, metrics, state

ROUNDS = "--trainer.max_rounds=4"
FAULTS = [
    "--trainer.faults=Faults",
    "--trainer.faults.drop_after=0.2",
    "--trainer.faults.corrupt=Corrupt",
    "--trainer.faults.corrupt.share=0.3",
    "--trainer.faults.stragglers=Stragglers",
    "--trainer.faults.stragglers.deadline=6",
]
FAILED = ("refused", "dropped")
CASES = {
    "FedSMOO": ["--model=FedSMOO"],
    "SCAFFOLD": ["--model=SCAFFOLD"],
    "FedDyn": ["--model=FedDyn"],
    "FedGAMMA": ["--model=FedGAMMA"],
    "MOON": ["--model=MOON"],
    "FedGloSS": ["--model=FedGloSS", "--model.ascent=SAM", "--model.averaging=SWA"],
    "two phases": ["--model=NaiveFedGloSS"],
    "no state": ["--model=FedSAM"],
    "faults": ["--model=FedSMOO", *FAULTS],
    "robust": ["--model=FedDyn", "--trainer.aggregation=CoordinateMedian"],
}


@pytest.mark.parametrize("args", CASES.values(), ids=CASES)
def test_nodes_give_the_bits_of_the_trainer(args: list[str], tmp_path: Path) -> None:
    """Weights, all of the server's state, metrics, and what the clients keep."""
    expected = trained(tmp_path / "trainer", *args, ROUNDS)
    nodes = Nodes(tmp_path, *args, ROUNDS)
    run = nodes.fit()
    assert_same(run.server, expected.server)
    assert metrics(run.folder.path) == metrics(expected.folder.path)
    assert run.incidents == expected.incidents and run.incidents.keys() == ({*FAILED} if FAULTS[0] in args else set())
    here, there = nodes.states(run), expected.clients.rows()
    assert here.keys() == there.keys()
    for client, row in there.items():
        assert_same(here[client], row)
