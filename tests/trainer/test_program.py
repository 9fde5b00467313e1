"""Rounds that nobody needs run as one program, with the bits of single rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.loggers.logger import Logger

import fl_lightning as fl
from fl_lightning import Callback, Checkpoints, Digits, DigitsMLP, FedAvg, FederatedTrainer, Part, UserError
from fl_lightning.core import DivergenceError, State
from fl_lightning.engine.recorded_rounds import RecordedRounds
from fl_lightning.trainer import program, resume
from fl_lightning.trainer.callbacks import checkpoints
from fl_lightning.trainer.measurements import Discrepancy, LambdaMax
from fl_lightning.trainer.participation.samplers import CohortSampler
from fl_lightning.trainer.resume import save
from fl_lightning.trainer.run import Run
from tests.problem import optimizer_for
from tests.runs import assert_same, metrics, state

CLASSES = {name: getattr(fl, name) for name in dir(fl)}
ALGORITHMS = [
    name
    for name, kind in CLASSES.items()
    if isinstance(kind, type) and issubclass(kind, fl.LocalObjective) and kind is not fl.LocalObjective
]
ONE_BY_ONE = {"FedScar", "FedScarl", "NaiveFedGloSS"}
"""Algorithms whose rounds have two phases, or whose server sums over what all clients keep."""
QUICK = {("FedSMOO", "graphed"), ("FedGMT", "batched")}


class Rounds(Callback):
    """Notes the rounds after which it is called, and needs none."""

    def __init__(self, fails_at: int = 99) -> None:
        self.fails_at, self.seen = fails_at, list[int]()

    def needs_round(self, t: int) -> bool:
        return False

    def on_round_logged(self, run: Run, metrics: Any) -> None:
        self.seen.append(run.rounds_done)
        if run.rounds_done == self.fails_at:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def ends_with_evaluated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it depends on the clock."""
    monkeypatch.setattr(program, "SHOWN_S", 0.0)


def train(
    root: Path, make: Any = FedAvg, *callbacks: Callback, resume: Any = None, parts: Any = (), **options: Any
) -> Run:
    torch.manual_seed(0)
    data_options = {name: options.pop(name) for name in ("batch_size", "stream", "val_fraction") if name in options}
    trainer = FederatedTrainer(
        callbacks=[*callbacks, *([] if any(isinstance(c, Checkpoints) for c in callbacks) else [Checkpoints(11)])],
        **{
            "max_rounds": 26, "eval_every": 20, "eval_last": 2, "engine": "graphed",
            "accelerator": "cpu", "threads": 1, "enable_progress_bar": False, "default_root_dir": str(root), **options,
            **({} if "sampler" in options else {"clients_per_round": 4}),
        },
    )  # fmt: skip
    optimizer = optimizer_for(make.__name__, 0.1, momentum=0.5)
    return trainer.fit(make(DigitsMLP(hidden=8), optimizer=optimizer, parts=[*parts]), data(**data_options), resume)


def data(**options: Any) -> Digits:
    return Digits(**{"num_clients": 9, "batch_size": 32, "partition": fl.Dirichlet(0.3), **options})


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TAKEN_BACK", 0)


def recorded(run: Run) -> int:
    """Returns how many records of whole rounds a run has made; 0 if it cannot record them."""
    assert isinstance(run.rounds, RecordedRounds)
    return 0 if run.rounds._refused else sum(map(len, run.rounds._records.values()))


def check_same(one: Run, other: Run) -> None:
    assert_same(state(one.folder.path), state(other.folder.path))
    assert metrics(one.folder.path) == metrics(other.folder.path)


@pytest.mark.sampled(slow=9)
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(ALGORITHMS, ("batched", "graphed"))
    ],
)
def test_the_bits_are_those_of_single_rounds(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs end at checkpoints and evaluations."""
    together = train(tmp_path, CLASSES[name], rounds := Rounds(), engine=engine)
    every = [*range(1, 27)]
    assert rounds.seen == (every if name in ONE_BY_ONE else [1, 11, 20, 22, 25, 26])
    one_by_one(monkeypatch)
    alone = train(tmp_path, CLASSES[name], rounds := Rounds(), engine=engine)
    assert rounds.seen == every
    check_same(together, alone)
    if engine == "graphed" and name not in ONE_BY_ONE:
        assert recorded(together)


FAILING: dict[str, dict[str, Any]] = {
    "before": {"faults": fl.Faults(drop_before=0.4)},
    "after": {"faults": fl.Faults(drop_before=0.2, drop_after=0.2)},
    "partial": {"faults": fl.Faults(stragglers=fl.Stragglers(2.0))},
    "lost": {"faults": fl.Faults(stragglers=fl.Stragglers(6.0, late="lost"))},
    "deadline": {"clock": fl.Clock(sec_per_sample=1e-3, deadline_s=0.6)},
    "sampler": {"sampler": fl.BernoulliSampler(0.5)},
}
"""Ways in which fewer clients answer than are asked, or as many as the sampler likes."""


@pytest.mark.sampled(slow=31, quick=4)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if name == "FedSMOO" else pytest.mark.slow)
        for name, how in product([name for name in ALGORITHMS if name not in ONE_BY_ONE], FAILING)
    ],
)
def test_rounds_of_fewer_clients(name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not answer have no weight; programs end before a round of nobody."""
    runs = []
    for _ in range(2):
        runs.append(train(tmp_path, CLASSES[name], rounds := Rounds(), **FAILING[how]))
        assert (len(rounds.seen) < 20) is (len(runs) == 1)
        one_by_one(monkeypatch)
    check_same(*runs)
    assert recorded(runs[0]) and runs[0].state.failures == runs[1].state.failures
    assert len({*metrics(runs[0].folder.path)["client/steps"]}) > 1


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("stop_s", [0.1, 1.0, 2.7, 4.0])
def test_a_program_ends_when_the_clock_does(stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        clock = fl.Clock(sec_per_sample=1e-3, server_s=0.01, max_time_s=stop_s)
        runs.append(train(tmp_path, FedAvg, rounds := Rounds(), clock=clock))
        seconds = [value for _, value in metrics(runs[-1].folder.path)["clock/time_s"]]
        assert seconds[-1] >= stop_s and all(value < stop_s for value in seconds[:-1])
        assert (len(rounds.seen) < len(seconds)) is (len(runs) == 1 and len(seconds) > 2)
        one_by_one(monkeypatch)
    check_same(*runs)


class Models(Callback):
    """Needs the local models of some rounds."""

    def __init__(self, *rounds: int) -> None:
        self.rounds, self.models = rounds, list[tuple[int, torch.Tensor]]()

    def needs_round(self, t: int) -> bool:
        return t in self.rounds

    def on_local_end(self, run: Run, result: Any) -> None:
        self.models.append((result.ctx.t, result.w))


@pytest.mark.slow
def test_evaluated_rounds_are_programs_and_those_whose_local_models_are_needed_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, models = [], list[Models]()
    for _ in range(2):
        models.append(Models(5, 19))
        runs.append(train(tmp_path, fl.SCAFFOLD, models[-1], rounds := Rounds(), eval_every=1))
        assert rounds.seen == [*range(1, 27)]
        assert {t for t, _ in models[-1].models} == ({0, 5, 19} if len(runs) == 1 else {*range(26)})
        one_by_one(monkeypatch)
    assert recorded(runs[0]) and runs[1].rounds is None
    check_same(*runs)
    alone = {t: torch.stack([w for round_, w in models[1].models if round_ == t]) for t in (5, 19)}
    assert all(
        torch.equal(torch.stack([w for round_, w in models[0].models if round_ == t]), v) for t, v in alone.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["batched", "graphed"])
def test_a_short_program_goes_on_after_evaluated_rounds(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows, with what is measured of held-out data, are those of single rounds; callbacks see them, too."""
    monkeypatch.setattr(program, "SHOWN_S", math.inf)
    runs, lengths, original = [], list[int](), program.length
    monkeypatch.setattr(program, "length", lambda run: lengths.append(original(run)) or lengths[-1])
    for _ in range(2):
        runs.append(train(tmp_path, fl.SCAFFOLD, rounds := Rounds(), engine=engine, eval_every=2, val_fraction=0.2))
        assert rounds.seen == (sorted([1, *range(2, 27, 2), 11, 25]) if len(runs) == 1 else [*range(1, 27)])
        one_by_one(monkeypatch)
    assert [n for n in lengths if n] == [1, 9, 11, 4]
    check_same(*runs)
    assert len(metrics(runs[0].folder.path)["server/val/acc"]) == 14


class Ends(Callback):
    """Ends the run after a round, the only one that it needs."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def needs_round(self, t: int) -> bool:
        return t + 1 == self.rounds

    def on_round_end(self, run: Run) -> None:
        run.should_stop = run.rounds_done == self.rounds


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("ends", "eval_every", "expected"),
    [(99, 1, [4, 8, 12, 16, 20, 24, 26]), (99, 26, [4, 8, 12, 16, 20, 24, 26]), (7, 26, [4, 7]), (8, 26, [4, 8])],
)
def test_flatness_is_measured_in_the_same_rounds_with_the_same_models(
    ends: int, eval_every: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is in the last round of a program, whose beginning and local models the monitor has not seen."""
    runs = []
    for _ in range(2):
        monitor = fl.FlatnessMonitor(4, metrics=[LambdaMax(samples=99), Discrepancy(samples=99)])
        runs.append(train(tmp_path, fl.SCAFFOLD, monitor, Ends(ends), eval_every=eval_every, eval_last=1))
        assert [t for t, _ in metrics(runs[-1].folder.path)["flatness/discrepancy"]] == expected
        one_by_one(monkeypatch)
    check_same(*runs)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(("ends", "measured"), [(99, [8, 16, 24, 26]), (21, [8, 16, 21]), (16, [8, 16]), (8, [8])])
def test_a_pseudo_gradient_needs_the_round_before_only(
    ends: int, measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs end two rounds before a measured one; of a program in which the run ends, two rounds are seen again."""
    runs = []
    for expected in ([1, 6, 7, 8, 14, 15, 16, ends, 22, 23, 24, 25, 26], range(1, 27)):
        monitor = fl.FlatnessMonitor(8, metrics=[fl.Updates(), fl.DeltaEpsilon(rho=0.1)])
        callbacks = (monitor, Ends(ends), rounds := Rounds(), Checkpoints())
        runs.append(train(tmp_path, fl.SCAFFOLD, *callbacks, eval_every=26, eval_last=1))
        assert rounds.seen == sorted({t for t in expected if t <= min(ends, 26)})
        for name in ("pseudo_gradient_cosine", "delta_epsilon"):
            assert [t for t, _ in metrics(runs[-1].folder.path)[f"flatness/{name}"]] == measured
        one_by_one(monkeypatch)
    check_same(*runs)


def test_a_pseudo_gradient_of_an_older_round_is_not_that_of_the_round_before(tmp_path: Path) -> None:
    """Where a run ends in an evaluated round after a program, a cosine is missing rather than that of other rounds."""
    monitor = fl.FlatnessMonitor(8, metrics=[fl.Updates()])
    run = train(tmp_path, fl.SCAFFOLD, monitor, Ends(21), eval_every=1, eval_last=1)
    logged = metrics(run.folder.path)
    assert [t for t, _ in logged["flatness/pseudo_gradient_norm"]] == [8, 16, 21]
    assert [t for t, _ in logged["flatness/pseudo_gradient_cosine"]] == [8, 16]


class Pairs(Callback):
    """Needs some rounds, each from its start to its end."""

    def __init__(self) -> None:
        self.started, self.ended = list[int](), list[int]()

    def needs_round(self, t: int) -> bool:
        return t in (5, 19)

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        self.started.append(ctx.t)

    def on_round_end(self, run: Run) -> None:
        self.ended.append(run.rounds_done - 1)


def test_a_callback_sees_a_round_whole_or_not_at_all(tmp_path: Path) -> None:
    """Evaluation ends a program after each round, and calls no end of a round whose start was not called."""
    train(tmp_path, FedAvg, pairs := Pairs(), eval_every=1)
    assert pairs.started == pairs.ended == [0, 5, 19]


class Counts(FedAvg):
    """Counts the server's steps outside its state."""

    steps = 0

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        self.steps += 1
        return server.replace(w=uploads.weighted("w") * (1 + 0.01 * self.steps))


class Looks(FedAvg):
    """Looks at values of the server's state."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        return server.replace(w=uploads.weighted("w") * (1.01 if float(uploads.mean("w")[0]) > 0 else 0.99))


class LooksAtAnArray(FedAvg):
    """Looks at values of the server's state by NumPy, and in broadcast as a list."""

    def broadcast(self, server: State, ctx: Any) -> State:
        return server.replace(w=server.w * (1 + 1e-3 * max(server.w.tolist())))

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        return server.replace(w=torch.from_numpy(np.clip(uploads.weighted("w").numpy(), -0.3, 0.3)))


class LooksAtALength(FedAvg):
    """Counts the weights that move far."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        step = uploads.weighted("w") - sent.w
        far = len(step[step.abs() > 1e-3]) + len((step < -1e-3).nonzero())
        return server.replace(w=sent.w + step * far / len(step))


class Masked(FedAvg):
    """Leaves out the weights of a mask that is always the same."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        mask, w = torch.arange(len(sent.w)) % 3 > 0, uploads.weighted("w")
        return server.replace(w=w + 1e-3 * w[mask].mean() / len(mask.nonzero()) + mask[:5].tolist()[1])


class Draws(FedAvg):
    """Draws before its first step."""

    def local_start(self, client: State, received: State, ctx: Any) -> Any:
        return received.w + 0.01 * ctx.randn_like(received.w), client


class CountsAndDraws(Counts):
    """Counts what the server sends; that clients draw when it has counted, no record may do."""

    def broadcast(self, server: State, ctx: Any) -> State:
        self.steps += 1
        return server

    def local_end(self, w: Any, client: State, received: State, ctx: Any) -> Any:
        return {"w": w + 0.01 * ctx.randn_like(w)}, client


class Keeps(FedAvg):
    """Keeps the model of the first contact, and what the server sent last; clients see them as vectors."""

    client_state = {"first": "w", "last": "zeros", "number": 2.0}

    def local_end(self, w: Any, client: State, received: State, ctx: Any) -> Any:
        return {"w": w + 0.1 * (client.first - client.last) / client.number}, client.replace(number=client.number + 1)

    def client_round_end(self, client: State, server: State) -> State:
        assert client.first.ndim == 1
        return client.replace(last=server.w * server.w.dot(client.first).sign())


class Scheduled(FedAvg):
    """Its server's hooks compute with the round."""

    def broadcast(self, server: State, ctx: Any) -> State:
        radius = min(ctx.t, 5) / 50 if ctx.t % 4 else 0.9**ctx.t
        return server.replace(w=server.w + radius / server.w.norm() * server.w)

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        return server.replace(w=uploads.weighted("w") * (1 - 0.01 / (ctx.t + 1)))


class Named(FedAvg):
    """Its hooks look rounds up by name, as in a table of JSON."""

    def broadcast(self, server: State, ctx: Any) -> State:
        return server.replace(w=server.w * {"3": 0.9}.get(str(ctx.t), 1.0))

    def local_step(self, w: Any, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w) * {"round 2": 0.5, "round 4": 2.0}.get(f"round {ctx.t}", 1.0), client


def swa(net: Any, **options: Any) -> FedAvg:
    return FedAvg(net, averaging=fl.SWA(start=3, cycle=3), **options)


swa.__name__ = "FedAvg"


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    ("make", "records", "options"),
    [
        (Counts, 0, {}),
        (Looks, 0, {}),
        (LooksAtAnArray, 0, {}),
        (LooksAtALength, 0, {}),
        (Masked, 1, {}),
        (Draws, 0, {}),
        (CountsAndDraws, 0, {}),
        (Keeps, 1, {}),
        (Scheduled, 3, {}),
        (Named, 0, {}),
        (swa, 5, {}),
        (fl.SCAFFOLD, 1, {"local_epochs": 2}),
        (fl.SCAFFOLD, 1, {"local_steps": 9}),
        (FedAvg, 2, {"sampler": fl.BernoulliSampler(0.5)}),
        (FedAvg, 1, {"clients_per_round": 1}),
    ],
)
def test_which_rounds_are_recorded(
    make: Any, records: int, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train as their hooks are written; all have the bits of single rounds."""
    together = train(tmp_path, make, Rounds(), **options)
    one_by_one(monkeypatch)
    check_same(together, train(tmp_path, make, Rounds(), **options))
    assert recorded(together) == records


class Slower(Callback):
    """Halves the weight of the proximal term after some rounds, so that rounds are recorded anew."""

    def needs_round(self, t: int) -> bool:
        return t % 5 == 4

    def on_round_end(self, run: Run) -> None:
        if run.rounds_done % 5 == 0:
            run.objective.mu /= 2  # type: ignore[operator]


class Sees(Callback):
    """Has some rounds to itself, which so run as single ones."""

    def needs_round(self, t: int) -> bool:
        return t % 4 == 3

    def on_local_end(self, run: Run, result: Any) -> None:
        pass


def test_what_a_single_round_caches_changes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round nobody answers, so that hooks have cached nothing when the first program is recorded."""
    options = {"faults": fl.Faults(available=[[], *[[*range(9)]] * 43]), "max_rounds": 44}
    together = train(tmp_path, fl.FedGloSS, Sees(), **options)
    assert recorded(together)
    one_by_one(monkeypatch)
    check_same(together, train(tmp_path, fl.FedGloSS, Sees(), **options))


@pytest.mark.slow
def test_records_of_settings_that_are_gone_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedRounds, "KEPT", 2)
    together = train(tmp_path, fl.FedProx, Slower())
    assert recorded(together) == 2
    one_by_one(monkeypatch)
    check_same(together, train(tmp_path, fl.FedProx, Slower()))


class Positive(Part):
    """A bit travels for each positive number."""

    def bits(self, bits: Any, values: Any, up: bool) -> Any:
        return {**bits, "positive": int((values["w"] > 0).sum())} if up else bits


class Decomposing(Part):
    """torch refuses to decompose what is not finite."""

    def phase_end(self, server: State, uploads: Any) -> State:
        torch.linalg.svdvals(uploads.weighted("w").view(2, -1))
        return server


@pytest.mark.parametrize(
    "method", ["randk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("topk", "qsgd", "sign"))]
)
def test_parts_with_bits_of_their_own(method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, what is left out of them, and bits that depend on values are those of single rounds."""
    runs = []
    for _ in range(2):
        parts = [Positive(), fl.Compress(method)]
        runs.append(train(tmp_path, fl.SCAFFOLD, rounds := Rounds(), parts=parts))
        assert (11 in rounds.seen) and (10 in rounds.seen) == (len(runs) == 2)
        one_by_one(monkeypatch)
    assert (method == "qsgd") == ("client.Compress.w" not in state(runs[0].folder.path))
    check_same(*runs)


@pytest.mark.slow
def test_checkpoints_by_time_fall_between_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cut no program, and change no bit; the last round is always saved."""
    runs = []
    for pause in (0.0, math.inf):
        saved: list[int] = []
        monkeypatch.setattr(checkpoints, "pause", lambda seconds, pause=pause: pause)
        monkeypatch.setattr(
            resume, "save", lambda run, path, saved=saved: saved.append(run.rounds_done) or save(run, path)
        )
        runs.append(train(tmp_path, fl.SCAFFOLD, rounds := Rounds(), Checkpoints()))
        assert rounds.seen == [1, 20, 25, 26]
        assert saved == ([1, 20, 25, 26] if pause == 0 else [26])
    check_same(*runs)


@pytest.mark.slow
def test_an_interruption_falls_between_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of rounds 12 to 20 is undone."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, fl.SCAFFOLD, Rounds(fails_at=20))
    [broken] = tmp_path.glob("*/*/checkpoints/last.ckpt")
    assert torch.load(broken, weights_only=False)["round"] == 11
    resumed = train(tmp_path, fl.SCAFFOLD, Rounds(), resume=str(broken))
    one_by_one(monkeypatch)
    check_same(resumed, train(tmp_path, fl.SCAFFOLD))


@pytest.mark.slow
def test_what_an_interruption_undoes_may_lie_beyond_the_last_checkpoint(tmp_path: Path) -> None:
    """Rounds 21 to 25 are undone, whose rows are in the log."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, fl.SCAFFOLD, Rounds(fails_at=25), Checkpoints())
    [broken] = tmp_path.glob("*/*/checkpoints/last.ckpt")
    assert torch.load(broken, weights_only=False)["round"] == 20
    check_same(train(tmp_path, fl.SCAFFOLD, Rounds(), resume=str(broken)), train(tmp_path, fl.SCAFFOLD))


@pytest.mark.slow
def test_the_count_of_divergences_is_in_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = train(tmp_path, on_divergence="continue")
    assert [value for _, value in metrics(together.folder.path)["client/diverged"]] == [0] * 26
    one_by_one(monkeypatch)
    check_same(together, train(tmp_path, on_divergence="continue"))


@pytest.mark.parametrize("part", [Part(), pytest.param(Decomposing(), marks=pytest.mark.slow)])
def test_a_program_ends_before_a_round_that_is_not_finite(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same clients are refused as one by one, and then all of them."""

    class Grows(FedAvg):
        def local_end(self, w: Any, client: Any, received: Any, ctx: Any) -> Any:
            factor = 1e30 if ctx.t == 4 else 1e5 if ctx.t in (12, 13, 14) else 1.0
            return super().local_end(w * factor * (1 + ctx.n_k // 200), client, received, ctx)

    lines = []
    for _ in range(2):
        with pytest.raises(DivergenceError) as error:
            train(tmp_path, Grows, parts=[part])
        lines.append(str(error.value))
        one_by_one(monkeypatch)
    together, alone = sorted(tmp_path.glob("*/version_*"))
    assert lines[0] == lines[1]
    assert_same(state(together), state(alone))
    assert metrics(together) == metrics(alone)


LACKING: dict[str, dict[str, Any]] = {
    "the engine batched or graphed": {"engine": "sequential"},
    "all clients in one block (no client_block)": {"client_block": 2},
    "rounds of one phase": {"make": fl.NaiveFedGloSS},
    "clients that train in rounds only (no Ditto)": {"parts": [fl.Ditto(0.1)]},
    "a server that sums nothing over what all clients keep": {"make": fl.FedScar},
    "the mean of uploads (no aggregation, no privacy)": {"aggregation": fl.CoordinateMedian()},
    "rounds (no asynchronous)": {"asynchronous": fl.FedBuff(2), "clock": fl.Clock(sec_per_sample=1e-3)},
    "uploads that arrive as they are (no faults.corrupt)": {"faults": fl.Faults(corrupt=fl.Corrupt(0.2))},
    "minibatches (data.batch_size)": {"batch_size": None},
    "samples in memory (no stream)": {"stream": True},
    "the clients' state in memory (client_memory)": {"make": fl.SCAFFOLD, "client_memory": 1e-9},
}
"""What runs lack, and such a run; tests/integration/test_processes.py has several processes, and parallel runs vary."""


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(("need", "options"), LACKING.items(), ids=[*LACKING])
def test_rounds_that_run_one_by_one(need: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = {"make": FedAvg, "max_rounds": 3, **options}
    run = train(tmp_path, options.pop("make"), rounds := Rounds(), **options)
    assert rounds.seen == [1, 2, 3] and program.lacking(run) == [need]


def test_all_needs_are_tested() -> None:
    assert {*LACKING} | {"one process, or deterministic", "one config, or one seed"} == {*program.NEEDS}
    assert [need for need in program.NEEDS if need in LACKING] == [*LACKING]


@pytest.mark.slow
def test_a_program_takes_half_of_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round shows how long one takes; an hour is enough for all the others that nobody needs."""
    run = train(tmp_path, FedAvg, rounds := Rounds(), max_rounds=9, max_time="00:01:00:00")
    assert rounds.seen == [1, 8, 9]
    run.state = replace(run.state, round=1, metrics={"time/round_s": 100.0})
    for elapsed, length in ((0.0, 7), (2900.0, 3), (3450.0, 0), (3700.0, 0)):
        monkeypatch.setattr(Run, "elapsed", elapsed)
        run.should_stop = False
        assert program.length(run) == length


@pytest.mark.slow
def test_a_program_holds_what_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(tmp_path)
    sample = data()
    sample.setup("fit")
    step = 32 * sample.sample_bytes(torch.float32)
    steps = 3 * 4 * (1 + max(len(client) for client in sample.clients) // 32)
    monkeypatch.setattr(program, "CHUNK", steps * step)
    bounded = train(tmp_path, FedAvg, rounds := Rounds())
    assert len(rounds.seen) > 9
    check_same(bounded, alone)


def test_what_does_not_fit_into_memory_runs_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(RecordedRounds, "train", fails)
    train(tmp_path, FedAvg, rounds := Rounds(), max_rounds=3)
    assert rounds.seen == [1, 2, 3]


class Listening(Logger):
    """A logger of the user's, which acts in a round."""

    name, version = "listening", "0"

    def __init__(self, act: Any) -> None:
        self.act = act

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.act(self, step)

    def log_hyperparams(self, *_: Any) -> None:
        pass


class Listener(Callback):
    """Shows the logger the run; its hook is an attribute."""

    def __init__(self, logger: Listening, hook: Any = None) -> None:
        self.logger = logger
        if hook:
            self.on_round_end = hook

    def on_fit_start(self, run: Run) -> None:
        self.logger.run = run


def stop(logger: Any, step: int | None) -> None:
    logger.run.should_stop |= step == 6


def decay(run: Run) -> None:
    run.objective.optimizer.lr *= 0.9


class Sometimes(CohortSampler):
    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        return [] if t % 5 == 3 else [t % m, (t + 1) % m]


class Positives(FedAvg):
    """A bit travels for each positive number."""

    def bits(self, values: Any, up: bool) -> int:
        return int((values["w"] > 0).sum()) if up else super().bits(values, up)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("kind", ["a logger stops", "a hook of an object", "no clients", "bits of an algorithm"])
def test_what_users_do_between_rounds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program sees it: it ends there, or is none."""
    runs = []
    for _ in range(2):
        logger = Listening(stop if kind == "a logger stops" else lambda *_: None)
        hook = decay if kind == "a hook of an object" else None
        options: dict[str, Any] = {"sampler": Sometimes()} if kind == "no clients" else {}
        make = Positives if kind == "bits of an algorithm" else FedAvg
        runs.append(
            train(tmp_path, make, Listener(logger, hook), max_rounds=13, engine="batched", loggers=logger, **options)
        )
        one_by_one(monkeypatch)
    assert runs[0].rounds_done == (7 if kind == "a logger stops" else 13)
    check_same(*runs)


class Slows(FedAvg):
    """Its server keeps the learning rate on itself."""

    def server_step(self, *arguments: Any) -> State:
        self.optimizer.lr *= 0.9
        return super().server_step(*arguments)


class Remembers(CohortSampler):
    drawn = 0

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        self.drawn += t > 0
        return [self.drawn % m]


@pytest.mark.parametrize(("make", "options"), [(Slows, {}), (FedAvg, {"sampler": Remembers()})], ids=["lr", "sampler"])
def test_what_was_drawn_ahead_must_not_change(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"draws several rounds ahead.* of round 10; make sampler and learning rate"):
        train(tmp_path, make, max_rounds=13, engine="batched", **options)


def test_memory_bounds_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variate, the server's state is two models; four clients keep one each."""
    alone = train(tmp_path, fl.SCAFFOLD, max_rounds=13, engine="batched")
    monkeypatch.setattr(program, "MEMORY", 3 * 6 * 4 * alone.net.w.numel())
    bounded = train(tmp_path, fl.SCAFFOLD, rounds := Rounds(), max_rounds=13, engine="batched")
    assert rounds.seen[:3] == [1, 4, 7]
    check_same(bounded, alone)
