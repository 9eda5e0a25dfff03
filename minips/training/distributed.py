"""Data parallel training under torchrun: each process takes a part of every batch, and gradients are summed by weight.

The result is that of one process with the same batch, up to the order of sums. gloo on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch import distributed as dist


class Group:
    """The processes of one run. `rank` of `size`; size 1 without torchrun."""

    def __init__(self, device: torch.device | None = None):
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device is not None and device.type == "cuda" else "gloo")
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
