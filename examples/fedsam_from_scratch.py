"""FedSAM in one file: what the package does for ``FedSAM(DigitsMLP())``, without its trainer, engines and algorithms.

Only data, partition, net and random streams are the package's. Loop, local step, averaging and evaluation are here, in
the order in which they run, and the weights are those of the package: ``tests/integration/test_example.py``.

    python examples/fedsam_from_scratch.py --rounds 100 --rho 0.1

FedSAM is FedAvg (McMahan et al., AISTATS 2017, Algorithm 1), whose clients take SAM steps (Foret et al., ICLR 2021):
Caldarola et al., ECCV 2022; Qu et al., ICML 2022.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fl_lightning import Digits, DigitsMLP, Dirichlet, UniformSampler
from fl_lightning.core.rng import generator


def gradient(fabric: L.Fabric, net: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of the minibatch's mean loss at weights w, both (d,)."""
    parameters = list(net.parameters())
    vector_to_parameters(w, parameters)  # views of w, not copies
    with fabric.autocast():
        loss = F.cross_entropy(net(x), y)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])


def accuracy(fabric: L.Fabric, net: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> float:
    """Returns the share of the samples that weights w classify correctly."""
    vector_to_parameters(w, net.parameters())
    net.eval()
    with torch.no_grad(), fabric.autocast():
        return (net(x).argmax(1) == y).double().mean().item()


def main(
    rounds: int = 50,  # T
    clients: int = 50,  # M
    clients_per_round: int = 10,  # S
    alpha: float = 0.05,  # concentration of the Dirichlet partition: the smaller, the fewer classes a client has
    batch_size: int = 16,  # B
    epochs: int = 1,  # E
    rho: float = 0.05,  # radius of the ascent
    lr: float = 0.1,  # eta
    momentum: float = 0.0,
    weight_decay: float = 4e-4,
    seed: int = 0,
    precision: str = "64-true",  # or 32-true
    accelerator: str = "cpu",
    devices: int = 1,  # processes, which share the cohort
    eval_every: int = 5,
) -> Tensor:
    """Trains, and returns the global model, (d,)."""
    fabric = L.Fabric(accelerator=accelerator, devices=devices, precision=precision)
    fabric.launch()
    dtype = torch.float64 if precision == "64-true" else torch.float32

    data = Digits(num_clients=clients, partition=Dirichlet(alpha=alpha))
    data.setup()
    data.to(fabric.device)
    x_train, x_test = data.x_train.to(dtype) / data.scale, data.x_test.to(dtype) / data.scale
    y_train, y_test = data.y_train, data.y_test

    torch.manual_seed(seed)
    net = DigitsMLP().to(fabric.device, dtype)
    w = parameters_to_vector(net.parameters()).detach()  # w^0, the global model
    sampler = UniformSampler(clients_per_round)

    for t in range(rounds):
        cohort = sampler(t, clients, seed)  # S_t: S of the M clients, without replacement
        total, samples = torch.zeros_like(w), sum(len(data.clients[k]) for k in cohort)

        for k in cohort[fabric.global_rank :: fabric.world_size]:  # in parallel: the processes share the cohort
            indices = data.clients[k]  # indices of its n_k samples
            w_k, buffer = w, None  # it starts from the global model, with a new momentum buffer
            order = generator(seed, "batches", t, 0, k)  # the same minibatches, whichever process trains it; 0: phase
            net.train()
            for _ in range(epochs):
                shuffled = indices[torch.randperm(len(indices), generator=order)].to(fabric.device)
                for batch in shuffled.split(batch_size):  # the last one may be short
                    x, y = x_train[batch], y_train[batch]

                    # SAM, eq. 2: the point of largest loss within radius rho, to first order; the norm is over all
                    # weights jointly, and a zero gradient gives no displacement
                    g = gradient(fabric, net, w_k, x, y)
                    ascent = g * (rho / (torch.linalg.vector_norm(g) + 1e-12))

                    # SAM, eq. 3: the gradient there, on the same minibatch, without the derivative of the ascent
                    g = gradient(fabric, net, w_k + ascent, x, y)

                    # SGD from w_k, not from the ascent point: weight decay, then momentum, then the step
                    g = torch.add(g, w_k, alpha=weight_decay)
                    buffer = g if buffer is None else torch.add(g, buffer, alpha=momentum)
                    w_k = w_k - lr * buffer

            total.add_(w_k, alpha=len(indices))  # sum of n_k w_k

        # w^{t+1} = sum_k n_k w_k / sum_k n_k over the cohort, written as the server's step of length 1 along the
        # pseudo-gradient delta = w^t - that mean (Reddi et al., ICLR 2021, Algorithm 2)
        delta = w - fabric.all_reduce(total, reduce_op="sum") / samples
        w = w - delta

        if (t + 1) % eval_every == 0 or t + 1 == rounds:
            fabric.print(f"round {t + 1:3d}  test accuracy {accuracy(fabric, net, w, x_test, y_test):.4f}")
    return w


if __name__ == "__main__":
    auto_cli(main)
