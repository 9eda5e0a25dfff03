"""The log of a run, and its loss as a plot."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

from ..command import require_matplotlib
from ..errors import MinipsError
from ..files import write_beside

WINDOW = 25  # steps of the running mean


def read_log(path: Path) -> list[dict]:
    """Entries of a run's log.jsonl by step; a resumed run repeats steps, and the later entry counts. MinipsError: not readable."""
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [{e["step"]: e for e in entries}[step] for step in sorted({e["step"] for e in entries})]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MinipsError(f"{path}: not readable as the log of a run ({brief_reason(error)})") from None


def brief_reason(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of the last `window` values at each place."""
    sums, total = [], 0.0
    for at, value in enumerate(values):
        total += value - (values[at - window] if at >= window else 0.0)
        sums.append(total / min(at + 1, window))
    return sums


def write_plot(stages: Sequence[Sequence[dict]], path: Path) -> None:
    """Loss by step, stages one behind another: every step faint, the running mean over it. MinipsError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes, first = figure.subplots(), 0
    for number, log in enumerate(stages, 1):
        steps, losses = [first + entry["step"] for entry in log], [entry["loss"] for entry in log]
        (line,) = axes.plot(steps, losses, linewidth=0.6, alpha=0.3)
        axes.plot(steps, running_mean(losses), color=line.get_color(), label=f"stage {number}, mean of {WINDOW} steps")
        first = steps[-1] if steps else first
    axes.set(xlabel="optimizer step", ylabel="loss (nats a target token)", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_beside(path, buffer.getvalue())
