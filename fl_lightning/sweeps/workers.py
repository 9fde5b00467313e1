"""Where groups of trials are trained: in this process, or in several that may be killed."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

Group = TypeVar("Group")
Result = TypeVar("Result")


def train_here(
    function: Callable[[Group], Result], groups: deque[Group]
) -> Generator[tuple[Group, Result | None], None, None]:
    """Trains groups in this process, one after another; yields each with its result.

    Args:
        function: Trains a group, and returns what is known of it then.
        groups: The groups; those that are appended meanwhile follow.
    """
    while groups:
        group = groups.popleft()
        yield group, function(group)


def train_in_processes(
    function: Callable[[Group], Result], groups: deque[Group], jobs: int, log: Path
) -> Generator[tuple[Group, Result | None], None, None]:
    """Trains groups in several processes; yields each as it ends, with its result, or None if its process was killed.

    A process that is killed is replaced, and the others do not notice. When this generator is closed, or if the calling
    process ends in any way, those that still train save what is done, and end. What they print goes to a file.

    Args:
        function: As for `train_here`; it is pickled.
        groups: As for `train_here`.
        jobs: Number of processes.
        log: The file.
    """
    idle: list[_Worker] = []
    busy: dict[_Worker, Group] = {}
    try:
        while groups or busy:
            while groups and len(busy) < jobs:
                worker = idle.pop() if idle else _Worker(function, log)
                group = groups.popleft()
                with suppress(OSError):  # it was killed while it was idle: it answers with the end of its pipe
                    worker.pipe.send(group)
                busy[worker] = group
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                group, result = busy.pop(worker), None
                try:
                    result = worker.pipe.recv()
                    idle.append(worker)
                except (EOFError, OSError):
                    worker.end()
                yield group, result
    finally:
        workers = [*idle, *busy]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


class _Worker:
    """A process that trains the groups that it is sent, and sends back what is known of them."""

    def __init__(self, function: Callable[[Any], Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, child_pipe, str(log)), daemon=False)
        self.process.start()
        child_pipe.close()  # so that the end of the process is the end of the pipe

    def end(self) -> None:
        self.process.join()
        self.pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection, log: str) -> None:
    """Works in a process of its own: it gets no signals of the terminal, ends with its parent, and prints to a file."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout = sys.stderr = Path(log).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115  for good
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=follow, daemon=True).start()
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            pipe.send(function(pipe.recv()))
