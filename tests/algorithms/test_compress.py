"""Compressed uploads: an independent transcription, the methods' identities, codes that are made, faults, privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning import (
    SCAFFOLD,
    SGD,
    AdaBest,
    Corrupt,
    DigitsMLP,
    Faults,
    FedAdamW,
    FedAvg,
    FedDyn,
    FedExP,
    FedLESAMS,
    FedMuon,
    FedNova,
    FedSAM,
    FedSMOO,
    FedWMSAM,
    GaussianPrivacy,
    ReplaySampler,
    UniformSampler,
    UserError,
)
from fl_lightning.algorithms.parts.compress import QSGD, Compress, Compressor, RandK, Sign, TopK, pack, unpack
from fl_lightning.core import ClientContext, Draws, State, generator
from tests.algorithms.test_parts import ENGINES, Personal, Rounded, same
from tests.integration.test_processes import launch
from tests.problem import Golden
from tests.runs import DIGITS, FORKS, assert_same, killed, last, metrics, run, state

D = 1220
"""Weights of the golden net."""
Vector = NDArray[np.float64]
METHODS: list[dict[str, Any]] = [
    {"method": "topk", "rate": 0.1},
    {"method": "randk", "rate": 0.1},
    {"method": "qsgd"},
    {"method": "sign"},
    {"method": "topk", "rate": 0.1, "error_feedback": False},
    {"method": "randk", "rate": 0.1, "error_feedback": False},
    {"method": "qsgd", "levels": 4, "bucket": None, "error_feedback": True},
    {"method": "sign", "error_feedback": False},
]
NAMES = ["-".join(map(str, options.values())) for options in METHODS]
each_method = pytest.mark.parametrize("options", METHODS, ids=NAMES)


# The rule, transcribed


def stream(seed: int, purpose: str, t: int, client: int) -> torch.Generator:
    return generator(seed, purpose, t, 0, client, Draws.END)


def transcribed(options: Mapping[str, Any], x: Vector, t: int, client: int) -> tuple[Vector, int]:
    """Returns c(x) and its bits, coordinate by coordinate, for 64 bits a number."""
    d, method = len(x), options["method"]
    if method in ("topk", "randk"):
        k = max(1, round(options["rate"] * d))
        if method == "topk":
            places = sorted(range(d), key=lambda j: (-abs(x[j]), j))[:k]
        else:
            places = torch.randperm(d, generator=stream(0, "randk", t, client))[:k].tolist()
        y = np.zeros(d)
        y[places] = x[places]
        if method == "randk":
            return (d / k * y if options.get("error_feedback") is False else y), 64 * k
        return y, k * (64 + math.ceil(math.log2(d)))
    if method == "sign":
        return np.abs(x).sum() / d * np.where(x < 0, -1.0, 1.0), d + 64
    s, size = options.get("levels", 15), options.get("bucket", 512) or d
    u = torch.rand(d, generator=stream(0, "qsgd", t, client), dtype=torch.float64).numpy()
    y = np.zeros(d)
    for j in range(d):
        length = np.sqrt((x[j // size * size :][:size] ** 2).sum())
        a = s * abs(x[j]) / length
        y[j] = length * np.sign(x[j]) * (math.floor(a) + (u[j] < a - math.floor(a))) / s
    omega = min(size / s**2, math.sqrt(size) / s) if options.get("error_feedback") else 0
    return y / (1 + omega), math.ceil(d / size) * 64 + d * (1 + math.ceil(math.log2(s + 1)))


@each_method
def test_transcription(options: dict[str, Any], golden: Golden) -> None:
    """Uploads, residuals, models and bits of each round follow from the local models and the draws by key alone."""
    run, record = golden.run(FedAvg(golden.net(), parts=[Compress(**options)], optimizer=SGD(0.1)))
    bits, residuals = 0, dict[int, Vector]()
    remembers = options.get("error_feedback", options["method"] != "qsgd")
    for t, clients in enumerate(record.local):
        w, total, samples = record.server[t].w.numpy(), np.zeros(D), 0
        for k, result in clients.items():
            x = result.w.numpy() - w + residuals.get(k, np.zeros(D))
            y, length = transcribed(options, x, t, k)
            np.testing.assert_allclose(result.upload["w"].numpy(), w + y, rtol=0, atol=1e-12)
            if remembers:
                residuals[k] = result.state["Compress.w"].numpy()
                np.testing.assert_allclose(residuals[k], x - y, rtol=0, atol=1e-12)
            total, samples, bits = total + result.ctx.n_k * (w + y), samples + result.ctx.n_k, bits + length + 64 * D
        np.testing.assert_allclose(record.server[t + 1].w.numpy(), total / samples, rtol=0, atol=1e-12)
    assert run.state.total_bits == bits and ("Compress.w" in run.clients.shapes) is remembers


@pytest.mark.slow
@pytest.mark.sampled(slow=7)
@each_method
@pytest.mark.parametrize("algorithm", [FedAvg, SCAFFOLD, FedAdamW, FedMuon])
def test_engines_agree(algorithm: Any, options: dict[str, Any], golden: Golden) -> None:
    if algorithm is SCAFFOLD and options["method"] == "sign":
        pytest.skip("changes of a variate are 0 but for rounding, which has other signs on other engines")
    parts = [Compress(**options)]
    first, *others = (golden.run(algorithm(golden.net(), parts=parts), engine=engine)[0] for engine in ENGINES)
    for other in others:
        same(first, other, 1e-10)
        assert other.state.total_bits == first.state.total_bits


@pytest.mark.sampled(quick=3, slow=2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["topk", "randk"])
def test_rate_1_is_the_algorithm(method: Any, engine: str, golden: Golden) -> None:
    """It is to the bit, on the wire and in the rows, also for algorithms that allow no compression."""
    plain, _ = golden.run(FedDyn(golden.net()), np.float32, engine=engine)
    run, _ = golden.run(FedDyn(golden.net(), parts=[Compress(method, rate=1)]), np.float32, engine=engine)
    same(run, plain)
    assert run.state.total_bits == plain.state.total_bits and run.clients.shapes == plain.clients.shapes


# What the methods promise

GAUSS = torch.randn(D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NONE = torch.zeros(0)


def c(method: Compressor, x: Tensor, drawn: Tensor = NONE) -> Tensor:
    return method.decode(method.encode(x, drawn), x.shape[-1], drawn)


def test_topk() -> None:
    top = TopK(0.1)
    for x in (GAUSS, GAUSS**5):
        y = c(top, x)
        assert (x - y).square().sum() <= (1 - 122 / D) * x.square().sum()
        assert torch.equal(c(top, y), y) and torch.equal(c(top, x * 2**-7), y * 2**-7)
        assert torch.equal(y + (x - y), x) and int((y != 0).sum()) == 122
    ties = torch.tensor([1.0, -2.0, 2.0, 2.0])
    assert (
        c(TopK(0.5), ties).tolist() == [0, -2, 2, 0] and c(TopK(0.5), ties.expand(3, 4)).tolist() == [[0, -2, 2, 0]] * 3
    )
    assert TopK(0.3).widths(10, 32) == [(3, 32), (3, 4)] and TopK(1e-9).k(10) == 1


def test_randk() -> None:
    """The mean over all subsets is x if scaled; unscaled it is k/d of it, by hand for d = 2."""
    x, sets = (
        torch.arange(1.0, 6.0, dtype=torch.float64) ** 2,
        [torch.tensor(pair) for pair in combinations(range(5), 2)],
    )
    scaled, plain = (torch.stack([c(RandK(0.4, scaled), x, pair) for pair in sets]).mean(0) for scaled in (True, False))
    torch.testing.assert_close(scaled, x, rtol=1e-14, atol=0)
    torch.testing.assert_close(plain, 0.4 * x, rtol=1e-14, atol=0)
    assert c(RandK(0.5, True), torch.tensor([3.0, 4.0]), torch.tensor([1])).tolist() == [0, 8]
    for bad in (math.inf, math.nan):  # that stays on the client: the upload is refused all the same
        assert not c(RandK(0.5), torch.tensor([bad, 4.0]), torch.tensor([1])).isfinite().all()


def test_qsgd() -> None:
    n, x = 200, GAUSS[:50]
    qsgd = QSGD(4, None)
    a = 4 * x.abs() / x.norm()
    levels = torch.stack([qsgd.encode(x, torch.full_like(x, (i + 0.5) / n))[1] for i in range(n)]) - 4
    assert torch.equal(levels, levels.round()) and levels.abs().max() <= 4
    assert ((levels.abs().mean(0) - a).abs() <= 1 / (2 * n) + 1e-12).all()
    u = torch.rand(1000, 50, dtype=torch.float64)
    error = (torch.stack([c(qsgd, x, drawn) for drawn in u]) - x).square().sum(-1).mean()
    assert error <= 1.05 * min(50 / 16, math.sqrt(50) / 4) * x.square().sum()
    assert torch.equal(c(qsgd, torch.zeros(7), torch.zeros(7)), torch.zeros(7))
    unit = 2 * torch.eye(5, dtype=torch.float64)[3]
    for drawn in (0.0, 0.5, 1 - 1e-12):
        assert torch.equal(c(QSGD(15, 3), unit, torch.full_like(unit, drawn)), unit)
    assert torch.equal(qsgd.encode(x, torch.zeros_like(x))[1] - 4, x.sign() * a.ceil())
    assert torch.equal(qsgd.encode(x, torch.full_like(x, 1 - 1e-15))[1] - 4, x.sign() * a.floor())
    for number in range(200):  # the norm of one number is rounded
        tiny = torch.rand(1, generator=torch.Generator().manual_seed(number)) * 1e-20
        assert int(QSGD(15, 1).encode(tiny, torch.zeros(1))[1]) <= 30
    assert QSGD(15, 512).widths(D, 32) == [(3, 32), (D, 5)]


def test_sign() -> None:
    y = c(Sign(), GAUSS)
    torch.testing.assert_close(y @ GAUSS, GAUSS.abs().sum() ** 2 / D)
    torch.testing.assert_close((GAUSS - y).square().sum(), GAUSS.square().sum() - GAUSS.abs().sum() ** 2 / D)
    assert c(Sign(), torch.tensor([0.0, -0.0, -3.0])).tolist() == [1, 1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "method", [TopK(0.1), RandK(0.1, True), QSGD(15, 512, True), QSGD(1, None), QSGD(300, 7), Sign()]
)
def test_codes(method: Compressor, dtype: torch.dtype) -> None:
    """Bytes are as many as the bits that are counted, and the other side makes the same vector of them, to the bit."""
    for d in (1, 2, 3, 64, 65, 1000):
        x, number = torch.randn(d, generator=torch.Generator().manual_seed(d)).to(dtype) * 1e-3, 8 * dtype.itemsize
        if isinstance(method, QSGD):
            drawn = torch.rand(d, dtype=dtype)
        else:
            drawn = torch.randperm(d)[: TopK(0.1).k(d)]
        code, widths = method.encode(x, drawn), method.widths(d, number)
        data, bits = pack(code, widths), sum(n * width for n, width in widths)
        assert data.dtype == torch.uint8 and 0 <= 8 * len(data) - bits < 8
        sent = unpack(data, widths, x)
        assert torch.equal(method.decode(sent, d, drawn), method.decode(code, d, drawn))


# In a federation


@pytest.mark.parametrize("options", METHODS[:4], ids=NAMES[:4])
def test_nothing_is_lost(options: dict[str, Any], golden: Golden) -> None:
    """With everybody there, the model plus the mean residual moves as the mean of what the clients did."""
    model = FedAvg(golden.net(), weighting="uniform", parts=[Compress(**{**options, "error_feedback": True})])
    _, record = golden.run(model, sampler=ReplaySampler([[0, 1, 2, 3]] * 6))
    virtual = record.server[0].w
    for t, clients in enumerate(record.local):
        virtual = virtual + torch.stack([r.w - record.server[t].w for r in clients.values()]).mean(0)
        residual = torch.stack([r.state["Compress.w"] for r in clients.values()]).mean(0)
        torch.testing.assert_close(record.server[t + 1].w + residual, virtual, rtol=0, atol=1e-13)
        assert residual.norm() > 1e-3


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("options", METHODS[:4], ids=NAMES[:4])
@pytest.mark.parametrize("algorithm", [SCAFFOLD, FedLESAMS, FedWMSAM])
def test_variates_stay_the_mean(algorithm: Any, options: dict[str, Any], golden: Golden) -> None:
    """A client adds what arrives of its change, so that the server's variate is that of all clients."""
    run, _ = golden.run(algorithm(golden.net(), parts=[Compress(**options)]))
    rows = [run.clients.rows().get(k, State({"c": torch.zeros(D)})).c for k in range(4)]
    torch.testing.assert_close(run.server.c, torch.stack(rows).mean(0), rtol=0, atol=1e-12)
    assert run.server.c.norm() > 1e-3 and "Compress.delta_c" not in run.clients.shapes


@pytest.mark.sampled(quick=3, slow=2)
@pytest.mark.parametrize("options", [*METHODS[:4], METHODS[6]], ids=[*NAMES[:4], NAMES[6]])
@pytest.mark.parametrize("engine", ENGINES)
def test_personal_weights_are_left_out(options: dict[str, Any], engine: Any, golden: Golden) -> None:
    """Lengths, places, norms and residuals are those of the weights that travel."""
    shared = D - 68
    parts = [Personal(["fc2.*"]), Compress(**options)]
    run, record = golden.run(SCAFFOLD(golden.net(), parts=parts), engine=engine, max_rounds=3)
    lengths, residuals, bits = run.clients.shapes, dict[int, Vector](), 0
    assert lengths["own"] == (68,) and lengths.get("Compress.w", (shared,)) == (shared,)
    for t, clients in enumerate(record.local):
        w = record.server[t].w[:shared]
        for k, result in clients.items():
            x = (result.w[:shared] - w).numpy() + residuals.get(k, np.zeros(shared))
            y, length = transcribed(options, x, t, k)
            np.testing.assert_allclose(result.upload["w"].numpy(), w.numpy() + y, rtol=0, atol=1e-12)
            if "Compress.w" in result.state:
                residuals[k] = result.state["Compress.w"].numpy()
            bits += 2 * (length + 64 * shared)
    assert run.state.total_bits == bits
    rows = [row.c for row in run.clients.rows().values()]
    torch.testing.assert_close(run.server.c, torch.stack(rows).sum(0) / 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", METHODS[:4], ids=NAMES[:4])
def test_nothing_shared_has_no_code(options: dict[str, Any], golden: Golden) -> None:
    run, _ = golden.run(FedAvg(golden.net(), parts=[Personal(["*"]), Compress(**options)]), max_rounds=1)
    assert run.state.total_bits == 0 and [*run.clients.shapes] == ["own"]


def test_nothing_travels_of_training_before_the_round(golden: Golden) -> None:
    parts = [Personal(["fc2.*"], epochs_alone=1)]
    fine, _ = golden.run(FedAvg(golden.net(), parts=[*parts, Compress("qsgd", levels=32767)]), max_rounds=2)
    plain, _ = golden.run(FedAvg(golden.net(), parts=parts), max_rounds=2)
    torch.testing.assert_close(fine.server.w, plain.server.w, rtol=0, atol=1e-4)


def test_nothing_kept_is_compression_alone(golden: Golden) -> None:
    some, none = ([*parts, Compress(rate=0.1)] for parts in ([Personal([])], []))
    same(*(golden.run(FedSAM(golden.net(), parts=parts))[0] for parts in (some, none)))


def test_a_lost_upload_keeps_its_residual(golden: Golden) -> None:
    """The run is that of the clients that answer, to the bit; a lost upload counts its download alone."""
    faults, parts = Faults(drop_after=0.3), [Compress(rate=0.1)]
    run, record = golden.run(FedAvg(golden.net(), parts=parts), faults=faults)
    answered = [[*clients] for clients in record.local]
    reference, _ = golden.run(FedAvg(golden.net(), parts=parts), sampler=ReplaySampler(answered))
    same(run, reference)
    lost = sum(map(len, golden.schedule)) - sum(map(len, answered))
    assert lost and run.state.total_bits == reference.state.total_bits + lost * 64 * D
    for t, clients in enumerate(record.client[1:]):
        for k in clients.keys() - {*answered[t + 1]}:
            assert torch.equal(clients[k]["Compress.w"], record.client[t][k]["Compress.w"])


def test_a_corrupted_upload(golden: Golden) -> None:
    """What arrives is corrupted, the client keeps its residual; NaN is refused, and its residual is as it was."""
    scaling = Faults(corrupt=Corrupt(share=1.0, kind="scale", factor=3.0))
    part = Compress(rate=0.1)
    _, record = golden.run(FedAvg(golden.net(), parts=[part], weighting="uniform"), faults=scaling, max_rounds=1)
    _, plain = golden.run(FedAvg(golden.net(), parts=[part], weighting="uniform"), max_rounds=1)
    (w0, w1), u1 = (r.w for r in record.server), plain.server[1].w
    torch.testing.assert_close(w1 - w0, 3 * (u1 - w0), rtol=0, atol=1e-14)
    for k, row in plain.client[0].items():
        assert torch.equal(record.client[0][k]["Compress.w"], row["Compress.w"])
    nan = Faults(corrupt=Corrupt(share=0.25, kind="nan"))
    run, _ = golden.run(FedAvg(golden.net(), parts=[part]), faults=nan, sampler=ReplaySampler([[0, 1, 2, 3]] * 6))
    assert len(run.clients.rows()) == 3


@pytest.mark.parametrize("options", METHODS[:4], ids=NAMES[:4])
def test_privacy_clips_what_arrives(options: dict[str, Any], golden: Golden) -> None:
    """Residual, compression and decoding precede the clip, the sum and the noise; what the clip cuts is not kept."""
    private = GaussianPrivacy(clip=0.05, noise_multiplier=0, delta=0.1)
    model = FedAvg(golden.net(), weighting="uniform", parts=[Compress(**options)])
    _, record = golden.run(model, privacy=private, sampler=UniformSampler(2))
    for t, clients in enumerate(record.local):
        w = record.server[t].w
        changes = [r.upload["w"] - w for r in clients.values()]
        clipped = [change * min(1.0, 0.05 / float(change.norm())) for change in changes]
        torch.testing.assert_close(record.server[t + 1].w, w + torch.stack(clipped).sum(0) / 2, rtol=0, atol=1e-12)
        assert min(change.norm() for change in changes) > 0.05
    for r in record.local[0].values() if options["method"] != "qsgd" else ():
        torch.testing.assert_close(r.state["Compress.w"], r.w - r.upload["w"], rtol=0, atol=1e-13)


def test_a_vector_that_the_server_rescales_travels_as_it_is(golden: Golden) -> None:
    """Third spec, B 2.2: a biased code would change the direction of FedSMOO's s."""
    parts = [Compress("topk", rate=0.1)]
    fedavg, plain = golden.run(FedAvg(golden.net(), parts=parts), max_rounds=2)
    run, record = golden.run(FedSMOO(golden.net(), use_dual=False, parts=parts), max_rounds=2)
    assert "Compress.w" in run.clients.shapes and "Compress.s" not in run.clients.shapes
    assert run.state.total_bits == fedavg.state.total_bits + 2 * 64 * D * sum(map(len, plain.local))
    for result in record.local[0].values():
        assert (result.upload["s"] != 0).float().mean() > 0.5 > (result.upload["w"] != result.received.w).float().mean()


def test_other_draws_stay(golden: Golden) -> None:
    """The draws of a compressor shift none of the algorithm's."""

    class Drawing(FedAvg):
        def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Any:
            return {"w": w + ctx.randn_like(w)}, client

    _, plain = golden.run(Drawing(golden.net()), max_rounds=1)
    _, record = golden.run(Drawing(golden.net(), parts=[Compress("randk", rate=0.5)]), max_rounds=1)
    for k, result in record.local[0].items():
        total = result.upload["w"] + result.state["Compress.w"]
        torch.testing.assert_close(total, plain.local[0][k].upload["w"], rtol=0, atol=1e-13)


REMEDY = "leave it out, or choose another algorithm"


DRIFT = f"keeps lam on server and clients, which would drift apart; {REMEDY}"
EXACT = "'s server computes with the exact upload"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda part: FedDyn(DigitsMLP(), parts=[part]), f"FedDyn {DRIFT}"),
        (lambda part: FedSMOO(DigitsMLP(), parts=[part]), f"FedSMOO {DRIFT}"),
        (lambda part: FedNova(DigitsMLP(), parts=[part]), f"FedNova{EXACT} update, tau; {REMEDY}"),
        (lambda part: FedExP(DigitsMLP(), parts=[part]), f"FedExP{EXACT} w, square; {REMEDY}"),
        (lambda part: AdaBest(DigitsMLP(), parts=[part]), f"AdaBest{EXACT} w; {REMEDY}"),
        (
            lambda part: FedSAM(DigitsMLP(), parts=[part, Rounded()]),
            "a part after it would change what it has compressed; list it last",
        ),
        (lambda part: Compress("sign", rate=0.1), "rate = 0.1: sign has no such setting; leave it out"),
        (lambda part: Compress("topk", bucket=None), "bucket = None: topk has no such setting; leave it out"),
        (
            lambda part: FedAvg(DigitsMLP(), parts=[Compress("qsgd", levels=4)]),
            "error_feedback = null: qsgd's variance may be 5.66 times the square; give true or false, or more levels",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        make(Compress())
    assert str(error.value) == f"model.parts = Compress: {message}"


# Kills and processes

PARTS = ["--model.parts+=Compress", "--model.parts.method=randk", "--model.parts.rate=0.1"]


@pytest.mark.long
@pytest.mark.skipif(not FORKS, reason="needs forks")
def test_kill_9(tmp_path: Path) -> None:
    """A run that is killed goes on to the same bits, the residuals included."""
    args = [
        *PARTS,
        "--trainer.max_rounds=60",
        "--trainer.callbacks+=Checkpoints",
        "--trainer.callbacks.every_n_rounds=7",
    ]
    broken = killed("fit", "--model=SCAFFOLD", *DIGITS, *args, root=tmp_path / "broken")
    assert 0 < last(broken)["round"] < 60
    assert run("fit", *args, "--ckpt_path=last", root=tmp_path / "broken", model="SCAFFOLD") == broken
    uninterrupted = run("fit", *args, root=tmp_path / "whole", model="SCAFFOLD")
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted) and "client.Compress.w" in state(uninterrupted)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Residuals are rows like others: the bits are those of one process."""
    one = run("fit", *PARTS, "--trainer.max_rounds=4", root=tmp_path / "one", model="SCAFFOLD")
    two = launch(2, "fit", "--model=SCAFFOLD", *DIGITS, *PARTS, "--trainer.max_rounds=4", cwd=tmp_path)
    assert_same(state(two), state(one))
    assert metrics(two)["comm/total_bits"] == metrics(one)["comm/total_bits"]
