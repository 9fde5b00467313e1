"""A small server of W&B's API on loopback: what ``wandb sweep``, an agent and an online run ask, from memory.

It answers the GraphQL operations by their names, takes the stream of a run's files, and any file that is uploaded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

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

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """Data for a GraphQL operation."""
        self.asked.append(operation)
        match operation:
            case "Viewer":
                flags = json.dumps({"code_saving_enabled": False})
                return {"viewer": {**WHO, "entity": "me", "username": "me", "flags": flags, "teams": {"edges": []}}}
            case "UpsertSweep":
                self.sweep = given["config"]
                return {"upsertSweep": {"sweep": {"name": "s1", "project": PROJECT}, "configValidationWarnings": []}}
            case "SweepWithRuns":
                return {"project": {"sweep": {"name": "s1", "config": self.sweep, "runs": {"edges": []}}}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "a1"}}}
            case "Heartbeat":
                commands = [] if any(json.loads(given["runState"]).values()) else [self.command()]
                return {"agentHeartbeat": {"agent": {"id": "a1"}, "commands": json.dumps(commands)}}
            case "UpsertBucket":
                told = {name: value for name, value in given.items() if value is not None}
                inserted = given["name"] not in self.runs
                self.runs.setdefault(given["name"], {}).update(told)
                bucket = {"id": given["name"], "project": PROJECT, "sweepName": given["sweep"], "historyLineCount": 0}
                return {"upsertBucket": {"bucket": {**given, **bucket}, "inserted": inserted}}
            case "RunResumeStatus":
                return {"model": {**PROJECT, "bucket": None}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/file/{name}"} for name in given["files"]]
                return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
            case "ArtifactType":
                return {"project": {"artifact": None}}
            case "CreateArtifact":  # as if it were there already
                return {
                    "createArtifact": {"artifact": {"id": "3", "state": "COMMITTED", "artifactSequence": {"id": "4"}}}
                }
        return {}

    def command(self) -> dict[str, Any]:
        """The agent's next command."""
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
        found: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            found = {"data": self.state.answer(named[1] if named else asked["query"], asked.get("variables") or {})}
        elif stream := re.fullmatch(r"/files/me/fl_lightning/(\w+)/file_stream", self.path):
            self.state.stream(stream[1], json.loads(body))
        self.reply(json.dumps(found).encode())

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
    """A server for one sweep with these trials."""
    state = Server([*trials])
    with HTTPServer(("127.0.0.1", 0), partial(Handler, state)) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()
