"""Measures of a round's models that need no data: norms, distances, angles."""

from collections.abc import Sequence
from statistics import mean

from fl_lightning.core import Positive, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import cosine, delta_epsilon
from fl_lightning.trainer.measurements.base import Measure, Measurement, MeasurementContext, PseudoGradient, dry_round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives


class Updates(Measure):
    """Norms, distances and angles of a round's models.

    - ``norm_w``: ‖w^{t+1}‖.
    - ``pseudo_gradient_norm``: ‖Δ̃^t‖, Δ̃^t = w̃^t - Σ_k p_k w_k, with w̃^t the model that was sent; and
      ``pseudo_gradient_cosine`` with that of the round before, if its local models were seen: a run that ends in an
      evaluated round before ``max_rounds`` may have trained it in a program.
    - ``drift``: mean ‖w̃^t - w_k‖, D of FedGF. ``distance`` and ``distance_max``: ‖w^{t+1} - w_k‖, the terms of FedGF's
      Theorem 2.
    - ``divergence_previous`` and ``divergence_next``: mean ‖w_k - w^t‖² and ‖w_k - w^{t+1}‖² (FedSMOO, Table 2).
    - ``step_sharpness``: rho ‖w^t - w^{t+1}‖ (FedGMT, Eq. 5).
    - Scalars of the server's state, such as ``server_c`` of FedGF.

    Args:
        rho: Radius of ``step_sharpness``.
    """

    tracks = True
    needs_statistics = False

    def __init__(self, rho: Positive = 0.05) -> None:
        self.rho = rho

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._models: list[LocalResult] = []

    def update(self, run: Run, result: LocalResult) -> None:
        self._models.append(result)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        models, self._models = self._models, []
        mine = {
            r.client: [float((r.w - w).norm()) for w in (r.received.w, context.old.w, context.new.w)] for r in models
        }
        found = collectives.all_gather_dict(context.run.fabric, mine)
        values = {"norm_w": float(context.new.w.norm())}
        if found:
            received, before, after = zip(*found.values(), strict=True)
            values |= {
                "drift": mean(received),
                "distance": mean(after),
                "distance_max": max(after),
                "divergence_previous": mean(d * d for d in before),
                "divergence_next": mean(d * d for d in after),
                "step_sharpness": self.rho * float((context.old.w - context.new.w).norm()),
            }
        if context.pseudo_gradient is not None:
            values["pseudo_gradient_norm"] = float(context.pseudo_gradient.norm())
            if context.previous is not None:
                values["pseudo_gradient_cosine"] = cosine(context.pseudo_gradient, context.previous)
        values |= {f"server_{name}": float(v) for name, v in context.new.items() if v.numel() == 1}
        settings = {"step_sharpness": {"rho": self.rho}}
        data = f"{len(found)} clients" if found else ""
        return [
            Measurement(name=name, value=v, model="models of the round", data=data, settings=settings.get(name, {}))
            for name, v in values.items()
        ]


class DeltaEpsilon(Measure):
    """``delta_epsilon``: distance of the last pseudo-gradient from the true one (FedGloSS, Eq. 6), from 0 to 2 rho.

    It trains the cohort once more, from the unperturbed global model. ``delta_epsilon_cosine`` is the cosine of the
    two. The first round has no last pseudo-gradient.

    Args:
        rho: The server's radius; null: the algorithm's own ``rho``.
    """

    local = True
    tracks = True
    needs_statistics = False

    def __init__(self, rho: Positive | None = None) -> None:
        self.rho = rho

    def check(self, run: Run) -> None:
        require(
            self.rho is not None or isinstance(getattr(run.objective, "rho", None), (int, float)),
            "measure: DeltaEpsilon.rho",
            self.rho,
            f"{type(run.objective).__name__} has no rho of its own, give one",
        )

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        mean = PseudoGradient(run)
        dry_round(run, cohort, mean.add, perturb=False)
        self._true = mean.value()

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        true, self._true = self._true, None
        if context.previous is None or true is None:
            return []
        rho = float(context.run.objective.rho if self.rho is None else self.rho)  # type: ignore[arg-type]
        values = {
            "delta_epsilon": delta_epsilon(context.previous, true, rho),
            "delta_epsilon_cosine": cosine(context.previous, true),
        }
        data = f"{len(context.cohort)} clients"
        return [
            Measurement(name=name, value=v, model="pseudo-gradients", data=data, settings={"rho": rho})
            for name, v in values.items()
        ]
