"""The items of a leg: processes do them, and a small JSON file has what they find.

One that crashes, hangs or breaks its device takes no other with it; an item is done once, and written at once.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import platform
import re
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

Item = Callable[[], dict[str, Any]]
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "batched": {"engine": "batched"},
    "graphed": {"engine": "graphed"},
    "compiled": {"engine": "graphed", "compile": True},
}
"""Settings of the trainer."""


class Task(NamedTuple):
    """What a leg works on.

    Attributes:
        module: The leg's module; its ``items(task)`` returns functions by name, in order of value.
        device: cuda or cpu.
        end: The time (`time.monotonic`, which all processes of a machine share) after which no item begins.
        out: The file of results; what else is kept lies beside it.
        fit: Arguments for ``fl-lightning fit``.
    """

    module: str
    device: str
    end: float
    out: Path
    fit: list[str]


class Results:
    """A small JSON file of what legs have found so far, by machine, leg and item.

    Args:
        path: The file.
        leg: The leg.

    Attributes:
        content: All of the file.
        found: The leg's part of it on this machine, once it has begun.
        failed: Items of this call that ended in an error, or whose check failed, now or in an earlier call.
    """

    def __init__(self, path: Path, leg: str) -> None:
        self.path, self.leg = path, leg
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def begin(self, machine: dict[str, str], names: Sequence[str], only: str = "") -> list[str]:
        """Returns the items to do whose name has the pattern ``only``, those that failed before at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._here = self.content.setdefault(machine_name(machine), {"machine": machine})
        self.found = self._here.setdefault(self.leg, {})
        self._names = names
        self._write()
        todo = [name for name in names if re.search(only, name) and not is_done(self.found.get(name))]
        return sorted(todo, key=lambda name: is_failure(self.found.get(name, {})))

    def add(self, name: str, value: dict[str, Any], log: str = "") -> None:
        """Writes what an item has found, and at which commit; ``log`` is kept in a file of its own."""
        at = os.environ.get("COMMIT")
        self.found[name] = {**value, **({"commit": at} if at else {})}
        self._write()
        if log:
            with self.path.with_suffix(".log").open("a") as file:
                file.write(f"== {self.leg}: {name}: {value.get('error')}\n{log}\n")
        numbers = {key: v for key, v in value.items() if isinstance(v, (int, float)) or key == "error"}
        line = ", ".join(f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}" for key, v in numbers.items())
        print(f"{name}: {line}", flush=True)

    def text(self) -> str:
        """Returns what was not reached."""
        missing = self._here[f"{self.leg}: not reached"]
        return f"{self.leg}: {len(self.found)} items in {self.path}; not reached: {', '.join(missing) or 'none'}"

    def _write(self) -> None:
        self.failed = [n for n in self._names if is_failure(self.found.get(n, {}))]
        missing = [name for name in self._names if not is_done(self.found.get(name))]
        self._here[f"{self.leg}: not reached"] = missing
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self.path)


def is_done(value: dict[str, Any] | None) -> bool:
    """Whether an item has ended, and was right; one that says that it is not whole goes on."""
    return value is not None and not is_failure(value) and value.get("whole", True)


def is_failure(value: dict[str, Any]) -> bool:
    return "error" in value or value.get("ok") is False


def machine(device: str) -> dict[str, str]:
    """Returns what the numbers belong to."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "kind": device,
        "device": name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def machine_name(machine: dict[str, str]) -> str:
    """Returns what tells machines apart in a file of results."""
    return f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"


def synchronize(device: str) -> None:
    """Returns when the device has done its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def accelerator(device: str) -> str:
    """Returns Fabric's name of a device."""
    return "gpu" if device == "cuda" else "cpu"


GRACE = 30.0
"""Seconds that an item may take beyond the end of its leg. One that is ended then has not been reached."""
TAIL = 8000
"""Characters of a failed item's output that are kept."""


class Leg(NamedTuple):
    """Most processes at the same time, with two cores each, and the seconds after which an item is ended."""

    jobs: int
    seconds: float


def fill(results: Results, task: Task, leg: Leg, only: str = "") -> None:
    """Does what is not done yet.

    Raises:
        ValueError: If no process can be started.
    """
    cores = os.cpu_count() or 1
    jobs = max(1, min(leg.jobs, cores // 2))
    threads = max(1, cores // jobs)
    idle, busy = [Worker(task, threads)], list[Worker]()
    try:
        machine, names = idle[0].hello()
        todo = deque(results.begin(machine, names, only))
        while busy or todo:
            while todo and len(busy) < jobs and time.monotonic() < task.end:
                busy.append(idle.pop() if idle else Worker(task, threads))
                busy[-1].begin(todo.popleft(), min(leg.seconds, task.end + GRACE - time.monotonic()))
            if not busy:
                break
            wait([worker.connection for worker in busy], max(0.0, min(w.until for w in busy) - time.monotonic()))
            for worker in [worker for worker in busy if worker.has_ended]:
                busy.remove(worker)
                value = worker.value()
                healthy = value is not None and "error" not in value
                if value is not None:
                    results.add(worker.item, value, "" if healthy else worker.output())
                idle.append(worker) if healthy else worker.close()
    finally:
        for worker in (*idle, *busy):
            worker.close()


class Worker:
    """A process that does one item after another, with its children in a process group."""

    def __init__(self, task: Task, threads: int) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        with tempfile.NamedTemporaryFile(prefix="gpu", suffix=".log", delete=False) as file:
            self.log = Path(file.name)
        self.process = context.Process(target=serve, args=(theirs, str(self.log), task, threads))
        self.process.start()
        theirs.close()
        self.task, self.item, self.until, self.start = task, "", 0.0, 0

    def hello(self) -> tuple[dict[str, str], list[str]]:
        """Returns the machine, and the names of all items."""
        self.connection.send(None)
        if not self.connection.poll(max(0.0, self.task.end + GRACE - time.monotonic())):
            raise ValueError(f"{self.task.module} does not start: importing takes longer than --seconds")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise ValueError(f"{self.task.module} does not start: {self._reason()}") from None

    def begin(self, item: str, seconds: float) -> None:
        self.item, self.until, self.start = item, time.monotonic() + seconds, self.log.stat().st_size
        with suppress(BrokenPipeError):  # it has crashed meanwhile, which `value` finds
            self.connection.send((item, seconds))

    @property
    def has_ended(self) -> bool:
        return self.connection.poll() or time.monotonic() >= self.until

    def value(self) -> dict[str, Any] | None:
        """Returns what the item has found, or why it has not; None if the leg's end has cut it off."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, ConnectionResetError):
                return {"error": self._reason()}
        cut = self.until > self.task.end + GRACE - 0.1
        return None if cut else {"error": "it was ended after its time; the log says where it was"}

    def output(self) -> str:
        """Returns the item's last output."""
        with self.log.open(errors="replace") as file:
            file.seek(self.start)
            return file.read()[-TAIL:]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # if it was too young to have a group
        self.process.join(5)  # not for one that hangs in a driver
        self.connection.close()
        self.log.unlink(missing_ok=True)

    def _reason(self) -> str:
        self.process.join(10)
        code = self.process.exitcode
        ending = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self.output().splitlines() if "error" in line.lower()]
        return ": ".join([f"its process ended, {ending}", *(line[:300] for line in lines[-1:])])


def serve(connection: Connection, log: str, task: Task, threads: int) -> None:
    """Works as a process: answers None with the machine and all names, and an item's name with what the item finds."""
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
    items = importlib.import_module(task.module).items(task)
    with suppress(EOFError):
        while True:
            match connection.recv():
                case None:
                    connection.send((machine(task.device), list(items)))
                case (name, seconds):
                    connection.send(_do(items[name], seconds))


def _do(item: Item, seconds: float) -> dict[str, Any]:
    started = time.perf_counter()
    faulthandler.dump_traceback_later(max(0.1, seconds - 1))  # where it hangs, if it does
    try:
        value = item()
        json.dumps(value)  # what it cannot hold is this item's error
    except Exception as error:
        traceback.print_exc()
        value = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {**value, "seconds": round(time.perf_counter() - started, 1)}


def _end_with_parent() -> None:
    wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)
