"""A contestant in its own process: it sets up, then trains as many rounds as each request asks for.

``python -m contest.worker '{"kind": "ours", "work": "W1", "method": "FedAvg", ...}'`` answers in lines of JSON: when
everything is imported; when it is set up, after a line on stdin; and then to each line with a number of rounds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

import torch

from contest import workloads


class Turns:
    """A contestant calls it after every round; it blocks while it is the others' turn.

    Attributes:
        left: Rounds that this turn still has.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever libraries print goes to stderr
        self.left = 0
        self._rounds: list[dict[str, float]] = []

    def ready(self, engine: str = "") -> None:
        """Answers, with the name of the engine if there is one, and waits."""
        self._answer(engine)

    def round(self, seconds: float, **more: float) -> None:
        """A round is done; it took ``seconds`` without evaluation."""
        self._rounds.append({"round_s": seconds, "loop_s": time.perf_counter() - self._since, **more})
        self.left -= 1
        if self.left == 0:
            self._answer(self._rounds)
        self._since = time.perf_counter()

    def _answer(self, value: str | list[dict[str, float]]) -> None:
        print(json.dumps(value), file=self._answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.left, self._rounds, self._since = int(line), [], time.perf_counter()


def main() -> None:
    spec = json.loads(sys.argv[1])
    work = workloads.work(spec)
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    contestant = importlib.import_module(f"contest.{spec['kind']}")
    turns = Turns()
    turns.ready()
    contestant.run(work, spec, turns)


if __name__ == "__main__":
    main()
