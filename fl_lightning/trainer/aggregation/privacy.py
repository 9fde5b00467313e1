"""Client-level differential privacy: clipped sums with Gaussian noise in place of the cohort's averages."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    ClientContext,
    Init,
    Interval,
    NonNegativeInt,
    Positive,
    Probability,
    RoundContext,
    State,
    Uploads,
    UserError,
    accumulator_dtype,
    ensure,
    require,
    to_device,
)
from fl_lightning.trainer.aggregation.accountant import Accountant, Method, cohorts
from fl_lightning.trainer.aggregation.base import Aggregation, Plan, Received, check_references, shortening
from fl_lightning.trainer.aggregation.noise import NoiseKey, cut, grid, rounded
from fl_lightning.trainer.participation.samplers import BernoulliSampler, CohortSampler

KEY = "trainer.privacy"
SMALLEST, LARGEST = 1e-12, 1e12
"""Bounds of the clipping norm."""
Norm = Annotated[float, Interval("[1e-12, 1e12]")]
LEAST = 1e-6
"""Smallest noise multiplier; with less noise no epsilon can be computed."""
Noise = Annotated[float, Interval("[0, 1e6]")]


class PrivateUploads(Uploads):
    """Averages over a fixed number of clients; the server learns nothing else about the cohort.

    Args:
        names: Uploaded names, and the names that are released in addition.
        n: The divisor of the sums.
        k_lr: Sum of the learning rates of a client's steps; null: the sum depends on the clients' data.
        like: A tensor with the dtype and device of the uploads.
    """

    def __init__(self, names: Sequence[str], n: float, k_lr: float | None, like: Tensor) -> None:
        super().__init__(names, "uniform", (), like)
        self.n = self.samples = n
        self._k_lr = None if k_lr is None else like.new_full((1,), k_lr)

    def mean(self, name: str) -> Tensor:
        if name != "k_lr":
            return super().mean(name)
        if self._k_lr is None:
            raise UserError(
                f"{KEY}: the server's step divides by the number of local steps, which differs between clients; set "
                "trainer.local_steps and let no deadline make it smaller, or choose another algorithm"
            )
        return self._k_lr


class GaussianPrivacy(Aggregation, key="trainer.privacy"):
    """The Gaussian mechanism: uploads clipped to a norm, their sum with noise, divided by a fixed number of clients.

    The mechanism subtracts the reference of each upload (`LocalObjective.references`) and clips the joint norm of a
    client's differences. A client that fails adds nothing. The sums are divided by the expected size of a cohort
    (McMahan et al., ICLR 2018). A secret key, which only the run's checkpoints hold, determines noise and cohorts.
    ``docs/privacy.md`` says what is protected.

    Args:
        clip: C, the largest norm.
        noise_multiplier: Standard deviation of the sum's noise, in units of C; null: the smallest one with which
            ``max_rounds`` rounds stay within ``epsilon``.
        epsilon: ε, the privacy budget. The run ends before the round that would exceed it; null: no limit.
        delta: δ, the probability with which the ε guarantee may fail; at most 1/M for M clients.
        accountant: RDP; or PLD, which is tighter and slower, and needs a BernoulliSampler.
        per_tensor: Clip each parameter tensor to C, as the official code of DP-FedSAM does. The norm of an upload is
            then at most sqrt(L) C for L tensors, and the accountant uses this bound.
        noise_seed: For tests and repeats: determines noise and cohorts, which then protect nobody; null: a new secret
            key in every run.

    Raises:
        UserError: If a setting is out of range.
    """

    empty = True

    def __init__(
        self,
        clip: Norm = 1.0,
        noise_multiplier: Noise | None = None,
        epsilon: Positive | None = None,
        delta: Probability = 1e-5,
        accountant: Method = "RDP",
        per_tensor: bool = False,
        noise_seed: NonNegativeInt | None = None,
    ) -> None:
        require(
            noise_multiplier is not None or epsilon is not None, f"{KEY}.noise_multiplier", None, "give it, or epsilon"
        )
        require(
            not noise_multiplier or noise_multiplier >= LEAST,
            f"{KEY}.noise_multiplier",
            noise_multiplier,
            f"give a number of at least {LEAST}, or 0",
        )
        self.clip, self.noise_multiplier, self.epsilon, self.delta = clip, noise_multiplier, epsilon, delta
        self.method: Method = accountant
        self.per_tensor, self.noise_seed = per_tensor, noise_seed
        self.noise_key = None if noise_seed is None else NoiseKey.of_seed(noise_seed)
        self._plan: Plan
        self._noiseless: Accountant

    # Before the first round

    def sampler(self, sampler: CohortSampler) -> CohortSampler:
        """Returns the sampler of a run under privacy: it never redraws an empty Bernoulli cohort."""
        return BernoulliSampler(sampler.p, redraw=False) if type(sampler) is BernoulliSampler else sampler

    def bind(self, plan: Plan) -> "GaussianPrivacy":
        bound = copy(self)
        bound._plan, bound.noise_key = plan, self.noise_key or NoiseKey.fresh()
        objective, drawn = plan.objective, cohorts(plan.sampler, plan.m)
        name = type(objective).__name__
        require(self.delta * plan.m <= 1, f"{KEY}.delta", self.delta, f"at most 1/M = 1/{plan.m}, for M clients")
        ensure(
            self.method == "RDP" or drawn["poisson"],
            f"{KEY}.accountant = {self.method}: only of cohorts by BernoulliSampler; choose RDP for UniformSampler",
        )
        ensure(
            objective.weighting == "uniform",
            f"model.weighting = {objective.weighting}: under trainer.privacy all count alike; set it to uniform",
        )
        ensure(
            not self.per_tensor or (objective.wire[1] == ("w",) and objective.has_global_model),
            f"{KEY}.per_tensor = true: for algorithms that upload the whole model alone; {name} uploads "
            f"{'a part of it' if not objective.has_global_model else ', '.join(objective.wire[1])}; set it to false",
        )
        ensure(
            objective.net_buffers is None or objective.net_buffers.policy != "reset",
            f"model.buffers = reset: under {KEY} statistics would be estimated on the clients' data without noise; "
            "set it to average or local",
        )
        check_references(KEY, objective)
        bound._noiseless = Accountant(
            **drawn, noise=0.0, delta=self.delta, releases=objective.phases, method=self.method, rounds=plan.rounds
        )
        return bound

    @cached_property
    def accountant(self) -> Accountant:
        """The accountant of the run's rounds."""
        noiseless, multiplier = self._noiseless, self.noise_multiplier
        noise = (
            noiseless.least_noise(self.epsilon or 0.0) if multiplier is None else multiplier / math.sqrt(self.pieces)
        )
        return replace(noiseless, noise=noise)

    def check_round(self) -> None:
        ensure(
            self.within_budget(1),
            f"{KEY}.epsilon = {self.epsilon}: the first round takes {self.accountant.epsilon(1):.4g}; raise "
            "noise_multiplier",
        )

    def within_budget(self, rounds: int) -> bool:
        """Returns whether a number of rounds stays within the budget."""
        return self.epsilon is None or self.accountant.epsilon(rounds) <= self.epsilon * (1 + 1e-6)

    @property
    def noise_multiplier_of_run(self) -> float:
        """Standard deviation of the sum's noise in units of C, before a released count takes its share."""
        return self.accountant.noise * math.sqrt(self.pieces)

    @property
    def identity(self) -> str:
        values = {
            **{name: getattr(self, name) for name in ("clip", "noise_multiplier", "delta", "method", "per_tensor")},
            "cohort": self._noiseless.size,
            "clients": self._noiseless.m,
            "poisson": self._noiseless.poisson,
            "secret": self.noise_seed is None,
        }
        if self.noise_multiplier is None:
            values |= {"epsilon": self.epsilon, "max_rounds": self._noiseless.rounds}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"

    def cohort_seed(self, seed: int) -> int:
        """Returns a secret seed, because epsilon counts on secret cohorts; without noise that of the run."""
        key = self.noise_key
        return seed if key is None or self.noise_multiplier == 0 else key.integer("cohorts")

    # Methods that a phase of a round calls

    def uploads(
        self, objective: LocalObjective, accepted: Sequence[ClientContext], ctx: RoundContext, like: Tensor
    ) -> Uploads:
        steps = self._plan.local_steps
        k_lr = None if steps is None else steps * objective.lr(ctx)
        return PrivateUploads([*objective.wire[1], *self.released], self.accountant.size, k_lr, like)

    def shapes(self, shapes: Mapping[str, list[int]], known: Mapping[str, Tensor]) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in known.items()} | dict(self.released)

    def fill(self, uploads: Uploads, received: Received) -> None:
        key, ctx, sums = self.noise_key, received.ctx, self.sums(received)
        assert key is not None

        def released(name: str, _: object) -> Tensor:
            total, std = sums[name]
            if std:
                draw = key.normal(total.numel(), "noise", ctx.t, ctx.phase, name).view(total.shape)
                total = total + to_device(rounded(std * draw, grid(std)), total.device, total.dtype)
            total = total + received.known[name].to(total) * uploads.n if name in received.known else total
            return torch.stack([total, total]).to(received.server.w)

        uploads.change(released)

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        """Returns ``privacy/snr``, the norm of the sum over the norm of its noise, from released values only."""
        if not self.accountant.noise or not any(value.numel() for value in known.values()):
            return {}
        steps = [uploads.mean(name) - value for name, value in known.items()]
        square = sum(float(step.to(accumulator_dtype(step.device)).square().sum()) for step in steps)
        noise = sum(v.numel() for v in known.values()) * (self.noise_std(self.bound_of(server)) / uploads.n) ** 2
        return {"privacy/snr": max(0.0, square / noise - 1) ** 0.5}

    # The mechanism

    released: Mapping[str, list[int]] = {}
    """Shapes of the values that are released in addition to the uploads, by name."""

    def bound_of(self, server: State) -> float:
        """Returns the norm C of a phase that starts from this server's state."""
        return self.clip

    def noise_std(self, clip: float) -> float:
        """Returns the standard deviation of the noise in each number of the uploads' sums."""
        return self.noise_multiplier_of_run * clip

    @property
    def pieces(self) -> int:
        """Number of pieces of an upload, each of which is clipped."""
        return len(self._plan.objective.flat.numels) if self.per_tensor else 1

    def sums(self, received: Received) -> dict[str, tuple[Tensor, float]]:
        """Returns the sums of a phase without noise, each with the standard deviation of its noise."""
        clip, device = self.bound_of(received.server), received.server.w.device
        sums = {name: torch.zeros_like(v, dtype=accumulator_dtype(v.device)) for name, v in received.known.items()}
        std = self.noise_std(clip)
        norms = [torch.zeros(0, dtype=accumulator_dtype(device), device=device)]
        for upload in received.arrived:
            differences = {name: upload[name].to(total) - received.known[name] for name, total in sums.items()}
            norm = torch.stack([v.norm() for v in differences.values()]).norm()
            for name, v in differences.items():
                parts = torch.split(v, received.ctx.flat.numels) if self.per_tensor else (v,)
                by = [part.norm() for part in parts] if self.per_tensor else [norm]
                shorter = [part * shortening(x, torch.full_like(x, clip)) for part, x in zip(parts, by, strict=True)]
                sums[name] += cut(torch.cat(shorter), grid(std)) if std else torch.cat(shorter)
            norms.append(norm.view(1))
        return {name: (total, std) for name, total in sums.items()} | self.further_sums(torch.cat(norms), clip)

    def further_sums(self, norms: Tensor, clip: float) -> dict[str, tuple[Tensor, float]]:
        """Returns the sums of the `released` values, as `sums` does.

        Args:
            norms: The clients' joint norms before clipping, ``(n,)``.
            clip: The norm C of the phase.
        """
        return {}


class AdaptivePrivacy(GaussianPrivacy):
    """`GaussianPrivacy` whose clipping norm follows a quantile of the norms (Andrew et al., NeurIPS 2021).

    Each phase also releases, with noise, the share of clients with a norm of at most C. The sums get more noise, so
    that both releases together have ``noise_multiplier``. Then ``C <- C exp(-clip_lr (share - quantile))``.

    Args:
        clip: Initial value of C.
        noise_multiplier: As for `GaussianPrivacy`.
        epsilon: As for `GaussianPrivacy`.
        delta: As for `GaussianPrivacy`.
        accountant: As for `GaussianPrivacy`.
        quantile: Target share of clients whose norm is at most C.
        clip_lr: Learning rate of C.
        count_noise: Standard deviation of the noise in the number of these clients; null: a twentieth of a cohort, but
            at least ``noise_multiplier``.
        noise_seed: As for `GaussianPrivacy`.
    """

    released = {"privacy_below": [1]}

    def __init__(
        self,
        clip: Norm = 0.1,
        noise_multiplier: Noise | None = None,
        epsilon: Positive | None = None,
        delta: Probability = 1e-5,
        accountant: Method = "RDP",
        quantile: Probability = 0.5,
        clip_lr: Annotated[float, Interval("[0, 10]")] = 0.2,
        count_noise: Noise | None = None,
        noise_seed: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(clip, noise_multiplier, epsilon, delta, accountant, noise_seed=noise_seed)
        self.quantile, self.clip_lr, self.count_noise = quantile, clip_lr, count_noise
        self.server_state: Mapping[str, Init] = {"privacy_clip": clip}

    def check_round(self) -> None:
        super().check_round()
        z = self.accountant.noise
        require(
            2 * self.count_std > z or not z,
            f"{KEY}.count_noise",
            self.count_noise,
            f"above half of {z:.4g}, the multiplier",
        )

    @property
    def count_std(self) -> float:
        """Standard deviation of the count's noise."""
        return max(self.accountant.size / 20, self.accountant.noise) if self.count_noise is None else self.count_noise

    @property
    def identity(self) -> str:
        return f"{super().identity}, quantile={self.quantile}, clip_lr={self.clip_lr}, count_noise={self.count_noise}"

    def bound_of(self, server: State) -> float:
        return float(server.privacy_clip)

    def noise_std(self, clip: float) -> float:
        """Returns ``(z^-2 - (2 sigma_b)^-2)^(-1/2) C``, the paper's Theorem 1."""
        z = self.accountant.noise
        return clip * z / math.sqrt(1 - (z / (2 * self.count_std)) ** 2) if z else 0.0

    def further_sums(self, norms: Tensor, clip: float) -> dict[str, tuple[Tensor, float]]:
        below = ((norms <= clip).to(norms) - 0.5).sum(0, keepdim=True)  # from -1/2 to 1/2 for each client
        return {"privacy_below": (below, self.count_std if self.accountant.noise else 0.0)}

    def phase_end(self, server: State, uploads: Uploads) -> State:
        clip = server.privacy_clip * torch.exp(-self.clip_lr * ((uploads.mean("privacy_below") + 0.5) - self.quantile))
        return server.replace(privacy_clip=clip.clamp(SMALLEST, LARGEST))

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        return {**super().metrics(uploads, known, server), "privacy/clip": self.bound_of(server)}
