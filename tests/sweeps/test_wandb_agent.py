"""W&B's own agent, from ``wandb sweep`` to finished trials, against a small server of its API on loopback.

The server holds what ``wandb sweep``, an agent and an online run ask in memory: it answers the GraphQL operations by
their names, takes the stream of a run's files, and any file that is uploaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.results.metrics import read_metrics
from tests.runs import DIGITS

FIXED = ["--model=FedSAM", *DIGITS, "--data.partition=Dirichlet", "--trainer.loggers=wandb"]
SWEEP = {
    "program": "fl-lightning",
    "method": "grid",
    "metric": {"name": "server/test/acc", "goal": "maximize"},
    "parameters": {"model.rho": {"values": [0.05, 0.1]}, "data.partition.alpha": {"values": [10.0, 0.5]}},
    "command": ["${env}", "fl-lightning", "fit", *FIXED, "${args}"],
}

WHO = {"id": "1", "name": "me"}
PROJECT = {"id": "2", "name": "fl_lightning", "entity": WHO}


@dataclass
class Server:
    """What the server has been told.

    Attributes:
        trials: Settings of the trials that the agent gets, one after another; then it gets an exit.
        url: Address.
        asked: Names of the GraphQL operations, in their order.
        sweep: The sweep's config.
        runs: What was told of each run, by its id.
        history: Logged rows, by the run's id.
        exits: Exit codes, by the run's id.
    """

    trials: list[dict[str, Any]]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    sweep: str = ""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns the data for a GraphQL operation."""
        self.asked.append(operation)
        match operation:
            case "Viewer":
                flags = json.dumps({"code_saving_enabled": False})
                return {"viewer": {**WHO, "entity": "me", "username": "me", "flags": flags, "teams": {"edges": []}}}
            case "UpsertSweep":
                self.sweep = variables["config"]
                return {"upsertSweep": {"sweep": {"name": "s1", "project": PROJECT}, "configValidationWarnings": []}}
            case "SweepWithRuns":
                return {"project": {"sweep": {"name": "s1", "config": self.sweep, "runs": {"edges": []}}}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "a1"}}}
            case "Heartbeat":
                commands = [] if any(json.loads(variables["runState"]).values()) else [self.command()]
                return {"agentHeartbeat": {"agent": {"id": "a1"}, "commands": json.dumps(commands)}}
            case "UpsertBucket":
                told = {name: value for name, value in variables.items() if value is not None}
                inserted = variables["name"] not in self.runs
                self.runs.setdefault(variables["name"], {}).update(told)
                bucket = {
                    "id": variables["name"],
                    "project": PROJECT,
                    "sweepName": variables["sweep"],
                    "historyLineCount": 0,
                }
                return {"upsertBucket": {"bucket": {**variables, **bucket}, "inserted": inserted}}
            case "RunResumeStatus":
                return {"model": {**PROJECT, "bucket": None}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/file/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
            case "ArtifactType":
                return {"project": {"artifact": None}}
            case "CreateArtifact":  # as if it were there already
                return {
                    "createArtifact": {"artifact": {"id": "3", "state": "COMMITTED", "artifactSequence": {"id": "4"}}}
                }
        return {}

    def command(self) -> dict[str, Any]:
        """Returns the agent's next command."""
        if not self.trials:
            return {"type": "exit"}
        args = {name: {"value": value} for name, value in self.trials.pop(0).items()}
        program = yaml.safe_load(self.sweep)["program"]
        return {"type": "run", "run_id": f"trial{len(self.trials)}", "program": program, "args": args}

    def stream(self, run: str, told: dict[str, Any]) -> None:
        """Takes what a run tells of its files."""
        lines = told.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.history.setdefault(run, []).extend(map(json.loads, lines))
        if told.get("complete"):
            self.exits[run] = told["exitcode"]


class HTTPServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A process that ends leaves its connections as they are."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: Server, *args: Any) -> None:
        self.state = server
        super().__init__(*args)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        reply: dict[str, Any] = {}
        if self.path == "/graphql":
            request = json.loads(body)
            match = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
            reply = {"data": self.state.answer(match[1] if match else request["query"], request.get("variables") or {})}
        elif stream := re.fullmatch(r"/files/me/fl_lightning/(\w+)/file_stream", self.path):
            self.state.stream(stream[1], json.loads(body))
        self.reply(json.dumps(reply).encode())

    do_PUT = do_POST

    def do_GET(self) -> None:
        self.reply(b"{}")

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(*trials: dict[str, Any]) -> Iterator[Server]:
    """Runs a server for one sweep with these trials."""
    state = Server([*trials])
    with HTTPServer(("127.0.0.1", 0), partial(Handler, state)) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()


@pytest.mark.slow
def test_the_agent_of_wandb_trains_what_the_server_asks(tmp_path: Path) -> None:
    """Each trial has its run folder with the trial's settings, and the server its metrics."""
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    trials = [{"model.rho": 0.05, "data.partition.alpha": 10.0}, {"model.rho": 0.1, "data.partition.alpha": 0.5}]
    with serving(*trials) as server:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        connection = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "0", "NO_PROXY": "127.0.0.1"}
        for args in (["sweep", "--project=fl_lightning", "sweep.yaml"], ["agent", "me/fl_lightning/s1"]):
            env = {**inherited, **connection, "HOME": str(tmp_path), "PATH": path}
            wandb = subprocess.run(["wandb", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
            assert wandb.returncode == 0, wandb.stderr
    assert [name for name in server.asked if "Sweep" in name or "Agent" in name] == [
        "UpsertSweep", "SweepWithRuns", "CreateAgent",
    ]  # fmt: skip
    assert server.exits == {"trial1": 0, "trial0": 0}
    for version, (run, settings) in enumerate(zip(("trial1", "trial0"), trials, strict=True)):
        folder = tmp_path / "runs" / "FedSAM-Digits" / f"version_{version}"
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        told = json.loads(server.runs[run]["config"])
        for config in (saved, {part: told[part]["value"] for part in ("model", "data")}):
            assert config["model"]["init_args"]["rho"] == settings["model.rho"]
            assert config["data"]["init_args"]["partition"]["init_args"]["alpha"] == settings["data.partition.alpha"]
        assert server.runs[run]["sweep"] == "s1"
        for name, values in read_metrics(folder / "metrics.csv").items():
            logged = [(row["round"], row[name]) for row in server.history[run] if name in row]
            assert dict(logged) == pytest.approx(dict(values)) and len(logged) == len(values), name
        assert (folder / "summary.json").exists()
