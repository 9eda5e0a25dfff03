"""Checkpoints of a training run: whole or not there, the newest two kept; parameters and optimizer in safetensors, the rest in JSON."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import MinipsError, brief
from ..files import write_folder, write_json
from ..reading import is_integer, read_json
from .network import Network

KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(folder: Path, step: int, network: Network, optimizer: torch.optim.AdamW, state: dict) -> Path:
    """Write `step-XXXXXXXX` into the run's folder. state: what else is needed to go on, as JSON."""
    tensors, steps = {}, {}
    for name, parameter in network.trainable().items():
        tensors[f"value.{name}"] = parameter.detach().cpu().contiguous()
        held = optimizer.state.get(parameter, {})
        for moment in _MOMENTS:
            if moment in held:
                tensors[f"{moment}.{name}"] = held[moment].detach().cpu().contiguous()
        steps[name] = int(held["step"]) if "step" in held else 0

    def fill(place: Path) -> None:
        save_file(tensors, place / "tensors.safetensors")
        write_json(place / "state.json", {**state, "step": step, "optimizer_steps": steps})

    written = write_folder(folder / f"step-{step:08d}", fill)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return written


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name)


def load_checkpoint(place: Path, network: Network, optimizer: torch.optim.AdamW) -> dict:
    """Put a checkpoint into the network and the optimizer; returns its state. MinipsError where it does not fit them."""
    state = read_json(place / "state.json")
    try:
        tensors = load_file(place / "tensors.safetensors")
    except (OSError, SafetensorError) as error:
        raise MinipsError(f"{place / 'tensors.safetensors'}: not readable ({error})") from None
    parameters = network.trainable()
    shapes = {f"value.{name}": parameter.shape for name, parameter in parameters.items()}
    shapes |= {name: parameters[name.partition(".")[2]].shape for name in tensors if name.partition(".")[2] in parameters}
    wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
    wrong += [name for name in tensors if name not in shapes]
    steps = state.get("optimizer_steps")
    if wrong or not is_integer(state.get("step")) or not isinstance(steps, dict) or set(steps) != set(parameters):
        raise MinipsError(f"{place}: does not fit this run's mapper and LoRA ({brief(sorted(wrong)[:3] or state.get('step'))})")
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[f"value.{name}"])
        if steps[name]:
            moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(steps[name])), **moments}
    return state
