"""FlexLoRA: the mean of LoRA's products, in place of the product of the factors' means."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, FlatSpec, State, Upload, Uploads, ensure


class FlexLoRA(Part):
    """FlexLoRA (Bai et al., NeurIPS 2024): the server averages the products ``B A`` of the clients' LoRA factors.

    It splits each mean again, ``B = U S^(1/2)`` and ``A = S^(1/2) V^T``, by the largest singular values, as many as the
    rank of the adapter: the best approximation of that rank. Here all clients have one rank. A client sends its
    factors, from which the server has the product: this is what the bits count.

    Raises:
        UserError: If the net has no adapters of linear layers, or the algorithm's server does more than average.
    """

    up = ("products",)

    def bind(self, flat: FlatSpec) -> Part:
        """Returns a part that knows the factors."""
        bound, shapes = copy(self), dict(zip(flat.names, flat.shapes, strict=True))
        bound.flat, bound.pairs = flat, [(n, n.replace("lora_A", "lora_B")) for n in flat.names if "lora_A" in n]
        linear = all(b in shapes and len(shapes[a]) == len(shapes[b]) == 2 for a, b in bound.pairs)
        ensure(
            bool(bound.pairs) and linear, "model.parts: FlexLoRA needs a LoRA net that trains A and B of linear layers"
        )
        return bound

    flat: FlatSpec
    pairs: list[tuple[str, str]]

    def attach(self, objective: Any) -> None:
        alone = objective.only_averages and len(objective.parts) == 1 and not objective.relaxed_init
        needs = (
            "the server averages models, and nothing else; take FedAvg or FedSAM, without server_update, relaxed_init "
            "and other parts"
        )
        ensure(alone, f"model.parts: FlexLoRA: {needs}")

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        by = self.flat.split(w)
        return {**upload, "products": torch.cat([(by[b] @ by[a]).flatten(-2) for a, b in self.pairs], -1)}, client

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        return {name: of for name, of in bits.items() if name != "products"}

    def phase_end(self, server: State, uploads: Uploads) -> State:
        by, at, products = dict(self.flat.split(server.w)), 0, uploads.weighted("products")
        for a, b in self.pairs:
            rank, (rows, columns) = len(by[a]), (len(by[b]), by[a].shape[1])
            U, S, V = torch.linalg.svd(products[at : at + rows * columns].view(rows, columns), full_matrices=False)
            U, V, root = U[:, :rank], V[:rank], S[:rank].sqrt()
            sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()  # of two equal decompositions, always one
            more = rank - len(root)  # a rank above the shorter side has no more singular values
            by[a], by[b] = pad((sign * root).T * V, (0, 0, 0, more)), pad(U * (sign * root), (0, more))
            at += rows * columns
        return server.replace(w=torch.cat([value.reshape(-1) for value in by.values()]))
