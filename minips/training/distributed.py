"""Data parallel training under torchrun: each process takes a part of every batch, and gradients are summed by weight.

The result is that of one process with the same batch, up to the order of sums. gloo on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import MinipsError


def device_of_process(device: str) -> str:
    """`device`, or under torchrun, where that means CUDA, the GPU of this process; MinipsError where there are fewer than processes."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return device
    count = torch.cuda.device_count()
    if local >= count:
        raise MinipsError(f"torchrun: process {local} of this machine has no GPU of its own, there are {count}; lower --nproc-per-node")
    return f"cuda:{local}"


class Group:
    """The processes of one run. `rank` of `size`; size 1 without torchrun."""

    def __init__(self, device: torch.device | None = None):
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            on_cuda = device is not None and device.type == "cuda"
            if on_cuda:
                torch.cuda.set_device(device)  # where NCCL works
            dist.init_process_group("nccl" if on_cuda else "gloo")
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = device or torch.device("cpu")

    def total(self, *numbers: float) -> list[float]:
        """Sums over all processes."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return values.tolist()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients in place, as one message; a missing one counts as zero."""
        if self.size == 1:
            return
        parameters = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat)
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.grad = grad.view_as(parameter)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
