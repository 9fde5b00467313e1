"""The set-up of a run: the same data, net and initial weights on every process."""

from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import FlatNet
from fl_lightning.core.frozen import constants, digest
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer.settings import Settings


def set_up(settings: Settings, objective: LocalObjective, data: FederatedDataModule) -> tuple[FlatNet, Tensor, str]:
    """Launches the processes, loads the data, and moves data and objective to the device.

    Returns:
        The flat view of the objective's net; the initial weights, ``(d,)``; and the hash of the net's frozen
        parameters, "" if it has none.
    """
    settings.launch()
    fabric = settings.fabric
    if fabric.local_rank == 0:
        data.prepare_data()
    fabric.barrier()
    data.setup("fit")
    data.to(fabric.device)
    objective.to(device=fabric.device, dtype=settings.dtype)
    net = FlatNet(objective.net)
    frozen = constants(objective.net)
    # through the CPU: what is broadcast keeps the device of rank 0
    for value in frozen.values() if fabric.world_size > 1 else ():
        value.copy_(fabric.broadcast(value.cpu()))
    w0 = fabric.broadcast(net.w.cpu()).to(fabric.device, copy=True)
    if objective.net_buffers is not None:
        objective.net_buffers.take(objective.net)
        objective.net_buffers.first = fabric.broadcast(objective.net_buffers.first.cpu()).to(w0)
    return net, w0, digest(frozen)
