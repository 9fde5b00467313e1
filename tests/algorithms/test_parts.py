"""Parts of one's own: compression and personal parameters on every engine, bits on the wire, owners of names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import (
    LESAM,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    ClientEvaluation,
    Digits,
    DigitsMLP,
    Dirichlet,
    FedAvg,
    FedDyn,
    FederatedTrainer,
    FedNova,
    FedProx,
    FedSAM,
    FlatnessMonitor,
    LocalObjective,
    LocalOptimizer,
    Personal,
    ReplaySampler,
    ServerMomentum,
    Trajectory,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, DivergenceError, FlatSpec, RoundContext, State, Upload
from fl_lightning.results.clients import read_clients
from fl_lightning.trainer.run import Run
from tests.runs import assert_same, cli, last, newest, run, state

ENGINES = ("sequential", "batched", "graphed")
D = 64 * 8 + 8 + 8 * 10 + 10
"""Weights of the net; its head, "3", has 90 of them."""


class TopK(Part):
    """Of the model's change a client uploads the largest entries only; the rest it adds to its next change."""

    client_state = {"error": "zeros"}

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    def bind(self, flat: FlatSpec) -> TopK:
        bound = copy(self)
        bound.k, bound.index_bits = max(1, round(self.rate * flat.d)), (flat.d - 1).bit_length()
        return bound

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        value = upload["w"] + client.error
        largest = (value - received.w).abs().topk(self.k, -1).indices
        sent = received.w.expand_as(value).scatter(-1, largest, value.gather(-1, largest))
        return {**upload, "w": sent}, client.replace(error=value - sent)

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        sparse = self.k * (8 * values["w"].element_size() + self.index_bits)
        return {**bits, "w": min(bits["w"], sparse)} if up else bits


class Rounded(Part):
    """The server sends its model in bfloat16."""

    def broadcast(self, sent: State, ctx: RoundContext) -> State:
        return sent.replace(w=sent.w.bfloat16().to(sent.w))

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        return bits if up else {**bits, "w": 16 * values["w"].numel()}


class Odd(Part):
    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, Any]:
        return {**bits, "w": 1.5 if up else bits["w"]}


def test_bits_are_whole_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.parts: bits of w = 1\.5: give an int of at least 0$"):
        FederatedTrainer(accelerator="cpu", max_rounds=1).fit(FedAvg(DigitsMLP(4), parts=[Odd()]), Digits())


class Lossless(Part):
    """A client uploads value and index of the entries above 0: their number differs from client to client."""

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        return {**bits, "w": 80 * int((values["w"] > 0).sum())} if up else bits


class Slot(Part):
    """Local state of a round."""

    scratch_state = {"first": "zeros"}
    server_state = {"moved": 0.0}
    up = ("moved",)

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        return w, client.replace(first=client.first + w + 1)

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        return {**upload, "moved": (w + 1 - client.first).abs().sum(-1, keepdim=True)}, client

    def phase_end(self, server: State, uploads: Any) -> State:
        return server.replace(moved=uploads.mean("moved"))


def fit(folder: Path, model: LocalObjective, engine: str = "sequential", **options: Any) -> tuple[Run, Trajectory]:
    record = Trajectory()
    options = {"max_rounds": 3, "clients_per_round": 3, "precision": "64-true", "callbacks": [], **options}
    callbacks = [record, *options.pop("callbacks")]
    trainer = FederatedTrainer(
        accelerator="cpu", threads=1, enable_progress_bar=False, default_root_dir=folder, engine=engine,  # type: ignore[arg-type]
        callbacks=callbacks, **options,
    )  # fmt: skip
    return trainer.fit(model, Digits(num_clients=6, partition=Dirichlet(0.5), batch_size=64)), record


def net() -> DigitsMLP:
    torch.manual_seed(0)
    return DigitsMLP(hidden=8)


def made(algorithm: Any = FedAvg, **options: Any) -> LocalObjective:
    objective: LocalObjective = algorithm(**{"net": net(), "optimizer": SGD(lr=0.1, momentum=0.5), **options})
    return objective


def kept() -> SGD:
    return SGD(lr=0.1, momentum=0.5, state="keep")


def same(a: Run, b: Run, places: float = 0.0) -> None:
    """Compares the server and the clients' rows."""
    for ours, theirs in ((a.server, b.server), *((row, b.clients.rows()[k]) for k, row in a.clients.rows().items())):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=places)


@pytest.mark.slow
@pytest.mark.sampled(slow=4, start=1)
@pytest.mark.parametrize("part", [TopK(0.05), Personal(["3.*"]), Slot()])
@pytest.mark.parametrize("algorithm", [FedAvg, SCAFFOLD])
def test_engines_agree(part: Part, algorithm: Any, tmp_path: Path) -> None:
    first, *others = (fit(tmp_path / e, made(algorithm, parts=[part], ascent=SAM(0.1)), e)[0] for e in ENGINES)
    plain, _ = fit(tmp_path / "plain", made(algorithm, ascent=SAM(0.1)))
    assert isinstance(part, Slot) == torch.equal(first.server.w, plain.server.w)
    for other in others:
        same(first, other, 1e-10)
        assert other.state.total_bits == first.state.total_bits


@pytest.mark.sampled(quick=3, slow=2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("parts", [[TopK(1.0)], [Personal([])], [Personal([]), TopK(1.0)]])
def test_parts_without_effect_are_fedavg(parts: list[Part], engine: str, tmp_path: Path) -> None:
    """They are to the bit, on the wire as well."""
    plain, _ = fit(tmp_path / "plain", made(FedDyn), engine, precision="32-true")
    run, _ = fit(tmp_path / "parts", made(FedDyn, parts=parts), engine, precision="32-true")
    same(run, plain)
    assert run.state.total_bits == plain.state.total_bits


def test_compression(tmp_path: Path) -> None:
    """What arrives changes k entries of the model; what does not is kept, until it is sent."""
    run, record = fit(tmp_path, made(parts=[TopK(0.05)]))
    k = round(0.05 * D)
    for t, clients in enumerate(record.local):
        for client, result in clients.items():
            sent, received = result.upload["w"], record.server[t].w
            assert int((sent != received).sum()) == k
            error = record.client[t - 1][client].error if t and client in record.client[t - 1] else 0
            torch.testing.assert_close(sent + result.state.error, result.w + error, rtol=0, atol=1e-15)
    assert run.state.total_bits == 3 * 3 * (64 * D + k * (64 + 10))
    assert run.metrics["comm/total_bits"] == run.state.total_bits
    units = run.state.total_bits / (3 * 64 * D)
    assert run.metrics["comm/transmissions"] == pytest.approx(units, abs=1e-12)


def test_personal_parameters(tmp_path: Path) -> None:
    """Rows hold the head alone, the server keeps the initial one, and each client is evaluated with its own."""
    monitor = FlatnessMonitor(3, [ClientEvaluation()])
    sampler = ReplaySampler([[0, 1, 2], [3, 4, 1], [2, 3, 4]])
    run, record = fit(tmp_path, made(parts=[Personal(["3.*"])]), callbacks=[monitor], max_rounds=3, sampler=sampler)
    head = slice(D - 90, D)
    start = record.server[0].w
    assert run.clients.shapes == {"own": (90,)}
    assert torch.equal(run.server.w[head], start[head]) and not torch.equal(run.server.w[:-90], start[:-90])
    heads: dict[int, Tensor] = {}
    for t, clients in enumerate(record.local):
        for client, result in clients.items():
            assert torch.equal(result.state.own, result.w[head]) and not torch.equal(result.w[head], start[head])
            assert result.upload["w"].shape == (D - 90,)
            heads[client] = result.w[head]
        sizes = torch.tensor([r.ctx.n_k for r in clients.values()], dtype=torch.float64)
        mean = sizes / sizes.sum() @ torch.stack([r.w for r in clients.values()])
        torch.testing.assert_close(record.server[t + 1].w[:-90], mean[:-90], rtol=0, atol=1e-12)
    assert run.state.total_bits == 3 * 3 * 2 * 64 * (D - 90)
    table = read_clients(run.folder.path)
    assert table is not None
    data = run.data
    x, labels = (torch.cat(part) for part in zip(*data.eval_batches("test", torch.float64), strict=True))
    losses = []
    for client in range(6):
        model = torch.cat([run.server.w[:-90], heads.get(client, start[head])])
        z = run.evaluator.logits(model, x)
        counts = data.class_counts(client).double()
        weight = (counts / counts.sum() / torch.bincount(labels, minlength=10))[labels]
        losses.append(float((torch.nn.functional.cross_entropy(z, labels, reduction="none") * weight).sum()))
    torch.testing.assert_close(torch.as_tensor(table.columns["loss"]), torch.tensor(losses[:5], dtype=torch.float64))
    assert run.metrics["server/clients/loss"] == pytest.approx(sum(losses[:5]) / 5)
    assert run.metrics["server/unseen_clients/loss"] == pytest.approx(losses[5])
    assert not any(name.startswith("server/test") for name in run.metrics)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["metric"] == "server/clients/acc" and summary["final"] == run.metrics["server/clients/acc"]


def test_smaller_broadcast(tmp_path: Path) -> None:
    run, record = fit(tmp_path, made(parts=[Rounded()]))
    assert run.state.total_bits == 3 * 3 * (16 + 64) * D
    for server, clients in zip(record.server[:-1], record.local, strict=True):
        for result in clients.values():
            assert torch.equal(result.received.w, server.w.bfloat16().double())
    assert not torch.equal(server.w, server.w.bfloat16().double())


def test_bits_may_depend_on_values(tmp_path: Path) -> None:
    run, record = fit(tmp_path, made(parts=[Lossless()]))
    up = [int((result.upload["w"] > 0).sum()) for clients in record.local for result in clients.values()]
    assert len({*up}) > 1 and run.state.total_bits == 9 * 64 * D + 80 * sum(up)


def test_scratch_and_uploads_of_a_part(tmp_path: Path) -> None:
    run, record = fit(tmp_path, made(parts=[Slot()]))
    moved = [(result.w - record.server[2].w).abs().sum() for result in record.local[2].values()]
    torch.testing.assert_close(run.server.moved[0], torch.stack(moved).mean(), rtol=0, atol=1e-10)
    assert run.state.total_bits == 9 * 64 * (2 * D + 1) and not run.clients.shapes


# The command line


HALF = ["--model.parts+=Personal", "--model.parts.keep=['3.*']", f"--model.parts+={__name__}.TopK"]


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    """Parts are named by dotted paths; a run that is resumed has the same bits, with the parts' rows."""
    fedavg = run("fit", root=tmp_path / "a")
    neutral = run("fit", f"--model.parts=[{__name__}.TopK]", "--model.parts.rate=1.0", root=tmp_path / "b")
    assert_same(without_rows(neutral), without_rows(fedavg))
    full = run("fit", *HALF, "--trainer.max_rounds=4", root=tmp_path / "whole")
    half = run("fit", *HALF, root=tmp_path / "half")
    cli("fit", "--ckpt_path", str(half / "checkpoints/last.ckpt"), "--trainer.max_rounds=4")
    assert_same(state(newest(tmp_path / "half")), state(full))
    assert last(full)["total_bits"] == 4 * 3 * (520 * 32 + 61 * (32 + 10))
    assert {name: value.shape[1] for name, value in last(full)["clients"]["rows"].items()} == {"own": 90, "error": 610}


def without_rows(folder: Path) -> dict[str, Tensor]:
    return {k: v for k, v in state(folder).items() if "client" not in k and k != "ids"}


# Names


class Server(LocalObjective):
    server_state = {"server_v": "w0"}


class Client(LocalObjective):
    client_state = {"w_last": "zeros"}


class Late(LocalObjective):
    """Declares its state at the end of its constructor."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.client_state = {"w_old": "zeros"}


class Summed(LocalObjective):
    up = ("w", "k_lr")


class Global(LocalObjective):
    server_state = {"w": "zeros"}


class Start(LocalObjective):
    scratch_state = {"start": "zeros"}


class Body(LocalObjective):
    down = ("body",)
    server_state = {"body": lambda w0: w0[:10].clone()}


class Silent(Part):
    up = ("more",)


@pytest.mark.parametrize(
    ("make", "what", "owners"),
    [
        (
            lambda: made(Server, server_update=ServerMomentum()),
            "server state 'server_v'",
            ("model.server_update = ServerMomentum", "model = Server"),
        ),
        (
            lambda: made(Client, relaxed_init=0.1),
            "client state 'w_last'",
            ("model.relaxed_init = RelaxedInit", "model = Client"),
        ),
        (lambda: made(Late, ascent=LESAM()), "client state 'w_old'", ("model.ascent = LESAM", "model = Late")),
        (lambda: made(parts=[TopK(), TopK()]), "client state 'error'", ("model.parts = TopK", "model.parts = TopK")),
        (
            lambda: made(parts=[Silent(), Silent()]),
            "the upload 'more'",
            ("model.parts = Silent", "model.parts = Silent"),
        ),
        (lambda: made(Summed), "the upload 'k_lr'", ("model = Summed", "the context")),
        (lambda: made(Global), "server state 'w'", ("model = Global", "the model")),
        (lambda: made(Start), "client state 'start'", ("model = Start", "local training")),
    ],
)
def test_each_name_has_one_owner(make: Any, what: str, owners: tuple[str, str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == f"{owners[0]}: {what} belongs to {owners[1]}; choose another name"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(Body), r"Body\.down = \('body',\): lacks 'w'"),
        (lambda: made(parts=[SAM()]), r"model\.parts = SAM: not in this list; set model\.ascent to it"),
        (
            lambda: made(FedNova, optimizer=kept()),
            r"model\.optimizer\.state = keep: FedNova counts the steps of a momentum",
        ),
        (
            lambda: made(SCAFFOLD, optimizer=kept(), momentum_aware=True),
            r"model\.optimizer\.state = keep: momentum_aware counts",
        ),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedCM"])
def test_a_learning_rate_of_0_by_which_an_algorithm_divides(name: str, tmp_path: Path) -> None:
    averaging = SWA(start=0, cycle=2, lr_min=0.0)
    with pytest.raises(DivergenceError, match=r"; the learning rate of this round is 0, by which some algorithms"):
        fit(tmp_path, made(getattr(algorithms, name), averaging=averaging))
    fit(tmp_path, made(FedAvg, averaging=averaging))


HOOKS = {
    "broadcast": "a value",
    "local_lr": "a value",
    "local_start": "two values",
    "seen_state": "two values",
    "local_end": "two values",
    "encoded": "a value",
    "decoded": "a value",
    "bits": "a value",
    "phase_end": "a value",
    "round_end": "a value",
    "client_model": "a value",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_without_a_return(hook: str, tmp_path: Path) -> None:
    def nothing(self: Part, *args: Any) -> None: ...

    nothing.__name__ = hook
    part = type("Empty", (Part,), {hook: nothing})()
    with pytest.raises(UserError) as error:
        fit(tmp_path, made(parts=[part]), callbacks=[FlatnessMonitor(3, [ClientEvaluation()])])
    values = HOOKS[hook]
    assert (
        str(error.value)
        == f"Empty.{hook} returns None; return {values}, as the docstring of this hook in the base class says"
    )


class NoBase(LocalObjective):
    def __init__(self, net: Any, mu: float = 0.1) -> None:
        self.mu = mu


class NetFirst(LocalObjective):
    def __init__(self, net: Any, **kwargs: Any) -> None:
        self.net = net
        super().__init__(net, **kwargs)


class BareOptimizer(SGD):
    def __init__(self, mu: float = 0.1) -> None:
        self.mu = mu


class BareAscent(SAM):
    def __init__(self, mu: float = 0.1) -> None:
        self.mu = mu


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: NoBase(net()), "NoBase"),
        (lambda: NetFirst(net()), "NetFirst"),
        (BareOptimizer, "BareOptimizer"),
        (BareAscent, "BareAscent"),
    ],
)
def test_a_constructor_without_that_of_its_base_class(make: Any, name: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == f"{name}: its constructor must call super().__init__() first, with the other arguments"


class Anchored(LocalOptimizer):
    """Gradient descent with a pull towards what it remembers."""

    state = {"anchor": "w0", "received": "w"}

    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: ClientContext) -> tuple[Tensor, State]:
        return w - lr * (direction + 0.1 * (w - memory.anchor)), memory


class Far(FedProx):
    """Uploads the distance of the optimizer's memory from where local training starts."""

    up, references, server_state = ("w", "far"), {}, {"far": 0.0}  # type: ignore[assignment]

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        remembered = torch.cat([client[f"Anchored.{name}"] - client.start for name in ("anchor", "received")], -1)
        return {"w": w, "far": remembered.norm(dim=-1, keepdim=True)}, client

    def server_step(self, server: State, sent: State, uploads: Any, ctx: RoundContext) -> State:
        return super().server_step(server, sent, uploads, ctx).replace(far=uploads.mean("far"))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_remembers_where_local_training_starts(engine: str, tmp_path: Path) -> None:
    """Its pull is then that of FedProx."""
    options = {"relaxed_init": 0.3, "net": net()}
    run, record = fit(tmp_path / "a", Far(mu=0.0, optimizer=Anchored(0.1), **options), engine)  # type: ignore[arg-type]
    assert torch.equal(run.server.far, torch.zeros(1, dtype=torch.float64))
    options = {"relaxed_init": 0.3, "net": net()}
    plain, _ = fit(tmp_path / "b", FedProx(mu=0.1, optimizer=SGD(0.1), **options), engine)  # type: ignore[arg-type]
    torch.testing.assert_close(run.server.w, plain.server.w, rtol=0, atol=1e-12)
    assert any(not torch.equal(r.state.w_last, record.server[2].w) for r in record.local[2].values())


class Warm(FedAvg):
    """Starts the optimizer's memory itself."""

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        return received.w + 1, client.replace(**{"Anchored.anchor": received.w})

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        assert torch.equal(client["Anchored.anchor"], received.w.expand_as(w))
        assert torch.equal(client["Anchored.received"], (received.w + 1).expand_as(w))
        return {"w": w}, client


def test_an_algorithm_may_start_the_memory_of_an_optimizer(tmp_path: Path) -> None:
    fit(tmp_path, Warm(net=net(), optimizer=Anchored(0.1)))


def test_a_part_uploads_what_it_declares(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Silent\.local_end uploads \['w'\], but declares up = \['more', 'w'\]$"):
        fit(tmp_path, made(parts=[Silent()]))


def test_parts_need_a_federation() -> None:
    with pytest.raises(UserError, match=r"train it with `fl-lightning fit` or FederatedTrainer\.fit, not centrally$"):
        made(FedSAM, parts=[Rounded()]).check_centralized()
