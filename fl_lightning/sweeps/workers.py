"""Where groups of trials are trained: in this process, or in several that may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

Group = TypeVar("Group")
Result = TypeVar("Result")


class Here(Generic[Group, Result]):
    """Trains groups in this process, one after another.

    Args:
        function: Trains a group, and returns what is known of it then.
    """

    def __init__(self, function: Callable[[Group], Result]) -> None:
        self.function = function

    def __enter__(self) -> Here[Group, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""

    def train(self, groups: deque[Group]) -> Iterator[tuple[Group, Result | None]]:
        """Yields each group with its result; groups that are appended meanwhile follow."""
        while groups:
            group = groups.popleft()
            yield group, self.function(group)


class Workers(Here[Group, Result]):
    """Trains groups in several processes. One that is killed is replaced, and the others do not notice.

    At the end of its context, or if this process ends in any way, the processes that still train save what is done, and
    end. What they print goes to a file.

    Args:
        jobs: Number of processes.
        function: Trains a group; it is pickled.
        log: The file.
    """

    def __init__(self, jobs: int, function: Callable[[Group], Result], log: Path) -> None:
        super().__init__(function)
        self.jobs, self.log = jobs, log
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, Group] = {}

    def train(self, groups: deque[Group]) -> Iterator[tuple[Group, Result | None]]:
        """Yields each group with its result as it ends, or with None if its process was killed."""
        while groups or self._busy:
            while groups and len(self._busy) < self.jobs:
                worker = self._idle.pop() if self._idle else _Worker(self.function, self.log)
                group = groups.popleft()
                with suppress(OSError):  # it was killed while it was idle: it answers with the end of its pipe
                    worker.pipe.send(group)
                self._busy[worker] = group
            ready = wait([worker.pipe for worker in self._busy])
            for worker in [worker for worker in self._busy if worker.pipe in ready]:
                group, result = self._busy.pop(worker), None
                try:
                    result = worker.pipe.recv()
                    self._idle.append(worker)
                except (EOFError, OSError):
                    worker.end()
                yield group, result

    def __exit__(self, *_: object) -> None:
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


class _Worker:
    """A process that trains the groups that it is sent, and sends back what is known of them."""

    def __init__(self, function: Callable[[Any], Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, there, str(log)), daemon=False)
        self.process.start()
        there.close()  # so that the end of the process is the end of the pipe

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
