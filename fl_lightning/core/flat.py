"""A network as one flat vector: the coordinates in which every algorithm is written.

Vectors have shape ``(..., d)``: ``(d,)`` for one client, ``(clients, d)`` for a cohort. The only reduction that an
algorithm needs is a norm over the last axis, with keepdim: ``(..., 1)``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ensure

EPS = 1e-12
"""What is added to every norm in a denominator, so that a zero vector gives zero, never NaN."""


UNRECORDED = ContextVar("unrecorded", default=False)
"""Whether a record leaves out what is done now."""


@contextmanager
def unrecorded() -> Iterator[None]:
    """A record leaves out the operations within it, and keeps their results."""
    token = UNRECORDED.set(True)
    try:
        yield
    finally:
        UNRECORDED.reset(token)


def norm(v: Tensor) -> Tensor:
    """Returns the Euclidean norm over all weights jointly: ``(..., d)`` to ``(..., 1)``."""
    result: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return result


def to_radius(v: Tensor, rho: float | Tensor, eps: float = EPS) -> Tensor:
    """Scales ``v`` of shape ``(..., d)`` to length ``rho``; a zero vector stays zero."""
    return v * (rho / (norm(v) + eps))


def is_finite(v: Tensor) -> Tensor:
    """Returns whether all values of each vector are finite, ``(..., d)`` to ``(...)``."""
    return torch.isfinite((v * 0).sum(-1))  # infinity times 0 is NaN, which no sum loses


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for sums of many values: float64, or float32 on Apple's MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def wait_for(device: torch.device) -> None:
    """Returns when a GPU has done what was launched; nothing else works behind the host's back."""
    if device.type == "cuda":
        torch.cuda.synchronize()


PAGEABLE = 1 << 16
"""Most bytes of ordinary memory that CUDA takes along with a command; it copies more at once, and the host waits."""


def to_device(values: Tensor | Sequence[Any] | float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies values to a device; the host does not wait for the GPU.

    Args:
        values: A tensor that does not change afterwards, or numbers.
        device: The device.
        dtype: Dtype of the result; by default that of the values.
    """
    x = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    on_gpu = device.type == "cuda"
    if on_gpu and not x.is_cuda and x.nbytes > PAGEABLE:
        x = x.pin_memory()  # which torch frees when the copy is done
    return x.to(device, dtype, non_blocking=on_gpu)


def matching(names: Sequence[str], patterns: Sequence[str], key: str = "parameters") -> list[str]:
    """Returns the names that match one of the patterns, in their own order.

    Raises:
        UserError: If there is no pattern, or one matches no name; it names the setting ``key``.
    """
    ensure(len(patterns) > 0, f"{key} = []: give at least one pattern, or null for all parameters")
    for pattern in patterns:
        matched = any(fnmatchcase(name, pattern) for name in names)
        ensure(matched, f"{key} = {pattern}: matches none of {', '.join(names[:4])}, ...; give a name or a pattern")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class FlatSpec:
    """Layout of a module's trainable parameters in one flat vector, in ``named_parameters()`` order.

    Attributes:
        names: Parameter names, in order.
        shapes: Their shapes.
        tied: Of every name of a parameter, which has several if modules share it, that in ``names``.
        types: Class names of the modules, by each of these names.
        d: Number of weights.

    Raises:
        UserError: If the module has no trainable parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        pairs = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        ensure(bool(pairs), f"model.net = {type(module).__name__} has no parameter to train; set requires_grad of some")
        self.names, self.shapes = [name for name, _ in pairs], [p.shape for _, p in pairs]
        first, named = {id(p): name for name, p in pairs}, module.named_parameters(remove_duplicate=False)
        self.tied = {name: first[id(p)] for name, p in named if id(p) in first}
        self.types = {name: type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in self.tied}
        self.numels = [p.numel() for _, p in pairs]
        self.d = sum(self.numels)
        self._masks: dict[tuple[frozenset[str], torch.device], Tensor] = {}

    def check(self, module: nn.Module) -> None:
        """Checks that those parameters of the module train that the layout holds.

        Raises:
            UserError: If some were frozen or set free since.
        """
        changed = {*self.names} ^ {name for name, p in module.named_parameters() if p.requires_grad}
        ensure(
            not changed,
            f"model.net: requires_grad of {', '.join(sorted(changed)[:3])} has changed since the algorithm was made; "
            "set it before that, or in the middle end the run, set it, and train a new algorithm with the net",
        )

    def parameters(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Returns the module's parameters in the order of the layout."""
        return map(module.get_parameter, self.names)

    def vector(self, module: nn.Module) -> Tensor:
        """Returns a copy of the module's weights, ``(d,)``."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters(module)])

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Writes ``vector`` of shape ``(d,)`` into the module's weights."""
        with torch.no_grad():
            for p, part in zip(self.parameters(module), self.split(vector).values(), strict=True):
                p.copy_(part)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns views of ``vector`` by parameter name, ``(..., d)`` to ``(..., *shape)``."""
        parts, lead = torch.split(vector, self.numels, dim=-1), vector.shape[:-1]
        return {n: p.view((*lead, *s)) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def not_finite(self, vector: Tensor) -> str:
        """Returns the first parameter in which a vector ``(d,)`` has a value that is not finite."""
        return next(name for name, part in self.split(vector).items() if not bool(part.isfinite().all()))

    def mask(self, names: Iterable[str], device: torch.device) -> Tensor:
        """Returns a mask ``(d,)`` of the weights of some parameters; it is cached."""
        key = (frozenset(names), device)
        if key not in self._masks:
            flags = [name in key[0] for name in self.names]
            with unrecorded():  # else a record that needs it first would hold these operations
                self._masks[key] = torch.repeat_interleave(torch.tensor(flags), torch.tensor(self.numels)).to(device)
        return self._masks[key]

    def normalize_by_filter(self, v: Tensor) -> Tensor:
        """Divides every tensor by its norms over its first dimension, that of the outputs, ``(..., d)`` (FedSOL)."""
        first = v.ndim - 1
        tensors = [p if p.ndim > first else p.unsqueeze(-1) for p in self.split(v).values()]
        norms = [torch.linalg.vector_norm(p, dim=first, keepdim=True).clamp(min=EPS) for p in tensors]
        return torch.cat([(p / n).flatten(first) for p, n in zip(tensors, norms, strict=True)], -1)

    def adaptive_scale(self, w: Tensor, eta: float) -> Tensor:
        """Returns ASAM's T, ``(..., d)``: ``|w| + eta`` for parameters with "weight" in their name, 1 for the rest."""
        return torch.where(self.mask([name for name in self.names if "weight" in name], w.device), w.abs() + eta, 1.0)


class FlatNet:
    """A module that moves from point to point of the weight space without copies: its parameters become views.

    Args:
        module: The module; its parameters get other memory, and it works as before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.spec = FlatSpec(module)
        self._parameters = list(self.spec.parameters(module))
        self.move_to(self.spec.vector(module))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.w.device

    def move_to(self, w: Tensor) -> None:
        """Makes the module's weights views of ``w``, ``(d,)``, which must not change in place while they are."""
        self.w = w
        for p, part, shape in zip(self._parameters, torch.split(w, self.spec.numels), self.spec.shapes, strict=True):
            p.data = part.view(shape)

    def gradient(self, loss: Tensor) -> Tensor:
        """Returns the gradient of a scalar that the module computed, ``(d,)``.

        Raises:
            UserError: If it does not depend on the weights.
        """
        ensure(
            loss.requires_grad,
            "model.net: the loss has no gradient with respect to its weights; compute outputs and loss by torch alone, "
            "without detach(), no_grad() or numbers taken out of tensors",
        )
        grads = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        # detached: of a weight that is not used, torch 2.9 returns zeros that require a gradient
        return torch.cat([g.reshape(-1) for g in grads]).detach()
