"""Plots of a run folder as PNGs, with matplotlib (extra `plot`), which is imported only when something is drawn.

A method has the same colour and marker in every plot; the colours are those of Okabe and Ito, told apart also by colour-blind readers.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import require_matplotlib
from ..files import write_beside
from .document import clean
from .measurements import read_attention, read_sweep
from .records import PREDS, read_rows
from .summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = {  # file: what it shows
    "methods.png": "Score of each method by task, with 95% intervals",
    "score_by_m.png": "Score of each method as m grows, with 95% intervals",
    "nll_by_m.png": "NLL of the reference answer as m grows, with 95% intervals",
    "timing_by_m.png": "Time to first token, end-to-end time and peak memory as m grows",
    "timing_by_length.png": "Time to first token, end-to-end time and peak memory as branches grow",
    "attention.png": "Share of the synthesizer's attention by layer: prefix, branches, itself",
    "attention_entropy.png": "Entropy of the synthesizer's attention over the branches as m grows",
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = "osD^vPX*"
KNOWN = ("parallel", "text", "single", "summary", "reuse", "ape", "naive", "best_of_n", "text_turn")
DPI = 130


def write_plots(folder: str | Path) -> list[Path]:
    """Draw all that the folder's files allow, and remove those plots that they do not; returns the paths of the PNGs.

    Raises MinipsError without matplotlib, and where a file of the folder is broken.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    folder, written = Path(folder), []
    tables = summarise(read_rows(folder))["tables"] if (folder / PREDS).exists() else []
    sweep, attention = read_sweep(folder) or [], (read_attention(folder) or {}).get("sweep", [])
    drawings: dict[str, Callable[[Figure], bool]] = {
        "methods.png": lambda figure: _methods(figure, tables),
        "score_by_m.png": lambda figure: _by_m(figure, tables, "score"),
        "nll_by_m.png": lambda figure: _by_m(figure, tables, "nll"),
        "timing_by_m.png": lambda figure: _timing(figure, sweep, "m", "branch_tokens"),
        "timing_by_length.png": lambda figure: _timing(figure, sweep, "branch_tokens", "m"),
        "attention.png": lambda figure: _attention(figure, attention),
        "attention_entropy.png": lambda figure: _entropy(figure, attention),
    }
    style = {"font.size": 10, "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
    for name, draw in drawings.items():
        with rc_context(style):
            figure = Figure(layout="constrained")
            if not draw(figure):
                (folder / name).unlink(missing_ok=True)  # of rows that were here before
                continue
            data = io.BytesIO()
            figure.savefig(data, dpi=DPI, format="png")
        write_beside(folder / name, data.getvalue())
        written.append(folder / name)
    return written


def _methods(figure: Figure, tables: Sequence[dict]) -> bool:
    """One panel a task, one bar a method; of a task with several m, the m that most tasks have."""
    counts = Counter(table["m"] for table in tables)
    best = {table["task"]: table for table in sorted(tables, key=lambda table: counts[table["m"]]) if table["metrics"]}
    tables = [table for table in tables if table is best.get(table["task"])]
    if not tables:
        return False
    names = _names(tables)
    columns = min(3, len(tables))
    panels = _grid(figure, len(tables), columns, 4.2, 0.9 + 0.32 * len(names))
    for at, (axes, table) in enumerate(zip(panels, tables)):
        metric = table["metrics"][0]
        for place, name in enumerate(names):
            found = table["methods"].get(name, {}).get("scores", {}).get(metric)
            if found:
                axes.barh(place, 100 * found["mean"], color=_look(name, names)[0], alpha=0.6, height=0.7)
                axes.errorbar(100 * found["mean"], place, xerr=_error(found, 100), color="#111111", capsize=3, linewidth=1.2)
        axes.set_yticks(range(len(names)), [_label(name) for name in names] if at % columns == 0 else [""] * len(names))
        axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 100), xlabel=f"{_label(metric)}, %")
        axes.set_title(f"{_label(table['task'])} (m = {table['m']}, {table['rows']} rows)")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle("Score by method, with 95% intervals")
    return True


def _by_m(figure: Figure, tables: Sequence[dict], what: str) -> bool:
    """One panel a task that was run with several m, one line a method."""
    tasks = [task for task in dict.fromkeys(table["task"] for table in tables) if sum(table["task"] == task for table in tables) > 1]
    tasks = [task for task in tasks if any(_points(tables, task, name, what) for name in _names(tables))]
    if not tasks:
        return False
    names = _names([table for table in tables if table["task"] in tasks])
    panels = _grid(figure, len(tasks), min(3, len(tasks)), 4.6, 3.6)
    for axes, task in zip(panels, tasks):
        own = [table for table in tables if table["task"] == task]
        for place, name in enumerate(names):
            colour, marker = _look(name, names)
            scale = 100 if what == "score" else 1
            shift = 2 ** (0.07 * (place - (len(names) - 1) / 2))  # side by side, so that no interval hides another
            points = _points(tables, task, name, what)
            if points:
                x, y = [m * shift for m, _ in points], [scale * found["mean"] for _, found in points]
                error = [[pair[side][0] for pair in (_error(found, scale) or [[0], [0]] for _, found in points)] for side in (0, 1)]
                axes.errorbar(x, y, yerr=error, color=colour, marker=marker, markersize=5, capsize=2, linewidth=1.2, label=_label(name))
        _log2(axes, [table["m"] for table in own])
        axes.set(
            xlabel="workers m", ylabel=f"{_label(own[0]['metrics'][0])}, %" if what == "score" else "NLL, nats a token (lower is better)"
        )
        bare = any(found["low"] is None for name in names for _, found in _points(tables, task, name, what))
        axes.set_title(f"{_label(task)}\n({min(t['rows'] for t in own)} rows{', too few for intervals' if bare else ''})")
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    figure.suptitle(f"{'Score' if what == 'score' else 'NLL of the reference answer'} as m grows, with 95% intervals")
    return True


def _points(tables: Sequence[dict], task: str, name: str, what: str) -> list[tuple[int, dict]]:
    points = []
    for table in tables:
        method = table["methods"].get(name) if table["task"] == task else None
        if method and table["metrics"]:
            points.append((table["m"], method["nll"] if what == "nll" else method["scores"][table["metrics"][0]]))
    return [(m, found) for m, found in points if found]


def _timing(figure: Figure, sweep: Sequence[dict], along: str, fixed: str) -> bool:
    """Three panels along m (or branch length), at the value of the other that was measured most often."""
    values = {key: {entry[along] for entry in sweep if entry[fixed] == key} for key in sorted({entry[fixed] for entry in sweep})}
    held = max(values, key=lambda key: len(values[key]), default=None)
    if held is None or len(values[held]) < 2:
        return False
    entries = sorted((entry for entry in sweep if entry[fixed] == held), key=lambda entry: entry[along])
    names = list(dict.fromkeys(entry["method"] for entry in entries))
    kinds: list[tuple[str, str, Callable[[dict], float | None]]] = [
        ("Time to first token", "seconds (median, bar up to p95)", lambda entry: entry["ttft"]["median"]),
        ("End to end", "seconds", lambda entry: entry.get("end_to_end")),
        ("Peak memory", "MB", lambda entry: entry.get("peak_mb")),
    ]
    kinds = [kind for kind in kinds if any(kind[2](entry) is not None for entry in entries)]
    panels = _grid(figure, len(kinds), len(kinds), 4.2, 3.6)
    for axes, (title, unit, get) in zip(panels, kinds):
        for name in names:
            colour, marker = _look(name, names)
            own = [entry for entry in entries if entry["method"] == name and get(entry) is not None]
            x, y = [entry[along] for entry in own], [get(entry) for entry in own]
            axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.5, label=_label(name))
            if title == "Time to first token":
                tails = [max(0.0, (entry["ttft"].get("p95") or value) - value) for entry, value in zip(own, y)]
                axes.errorbar(x, y, yerr=[[0.0] * len(y), tails], color=colour, capsize=3, linestyle="none", linewidth=1)
        _log2(axes, [entry[along] for entry in entries])
        axes.set(xlabel="workers m" if along == "m" else "tokens a branch", ylabel=unit, title=title)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    at = f"{held} tokens a branch" if along == "m" else f"m = {held}"
    figure.suptitle(f"Cost as {'m grows' if along == 'm' else 'branches grow'} ({at}), measured here")
    return True


def _attention(figure: Figure, sweep: Sequence[dict]) -> bool:
    """One panel an m: shares of prefix, all branches and the synthesizer's own tokens, stacked, by layer."""
    if not sweep:
        return False
    panels = _grid(figure, len(sweep), min(3, len(sweep)), 4.0, 3.0)
    for axes, entry in zip(panels, sweep):
        parts = {"prefix": entry["prefix"], "branches": [sum(shares) for shares in entry["branches"]], "itself": entry["self"]}
        layers = range(len(entry["prefix"]))
        colours = (COLOURS[0], COLOURS[4], COLOURS[2])
        axes.stackplot(layers, [[100 * share for share in part] for part in parts.values()], labels=list(parts), colors=colours, alpha=0.85)
        axes.set(xlim=(0, max(1, len(layers) - 1)), ylim=(0, 100), xlabel="layer", ylabel="share, %", title=f"m = {entry['m']}")
    _legend(figure, panels)
    figure.suptitle("Where the synthesizer's attention goes, by layer")
    return True


def _entropy(figure: Figure, sweep: Sequence[dict]) -> bool:
    """Left: mean over layers against the maximum, log m. Right: entropy over its maximum, by layer."""
    sweep = sorted((entry for entry in sweep if entry["m"] > 1), key=lambda entry: entry["m"])
    if not sweep:
        return False
    whole, layers = _grid(figure, 2, 2, 4.8, 3.6)
    sizes = [entry["m"] for entry in sweep]
    means = [sum(entry["entropy"]) / len(entry["entropy"]) for entry in sweep]
    whole.plot(sizes, [entry["max_entropy"] for entry in sweep], color="#333333", linestyle="--", marker="_", label="maximum: log m")
    ends = [[max(0.0, mean - min(entry["entropy"])) for mean, entry in zip(means, sweep)]]
    ends += [[max(0.0, max(entry["entropy"]) - mean) for mean, entry in zip(means, sweep)]]
    whole.errorbar(sizes, means, yerr=ends, color=COLOURS[0], marker="o", capsize=3, label="mean over layers (bar: least and most)")
    _log2(whole, sizes)
    whole.set(xlabel="workers m", ylabel="entropy, nats", title="Entropy over branches")
    whole.set_ylim(bottom=0)
    whole.legend(frameon=False, fontsize=9)
    for entry, colour, marker in zip(sweep, _cycle(COLOURS), _cycle(MARKERS)):
        ratio = [value / entry["max_entropy"] for value in entry["entropy"]] if entry["max_entropy"] else [math.nan] * len(entry["entropy"])
        layers.plot(ratio, color=colour, marker=marker, markersize=4, linewidth=1.2, label=f"m = {entry['m']}")
    layers.set(xlabel="layer", ylabel="entropy / maximum", title="Evenness by layer (1: all branches alike)")
    layers.set_ylim(0, 1.05)
    layers.legend(frameon=False, fontsize=9, ncols=2)
    for axes in (whole, layers):
        axes.grid(alpha=0.3)
    figure.suptitle("Does attention dilute over the branches?")
    return True


def _grid(figure: Figure, count: int, columns: int, width: float, height: float) -> list[Axes]:
    """`count` panels of width x height inches."""
    rows = -(-count // columns)
    figure.set_size_inches(max(6.0, columns * width), 0.8 + rows * height)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_axis_off()
    return panels[:count]


def _names(tables: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table["methods"]))


def _look(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: a known method's own, any other's by its place behind them."""
    at = KNOWN.index(name) if name in KNOWN else len(KNOWN) + [other for other in names if other not in KNOWN].index(name) * 3
    return COLOURS[at % len(COLOURS)], MARKERS[(at + at // len(COLOURS)) % len(MARKERS)]


def _label(text: str) -> str:
    """A name as it can stand in a plot: on one line, bounded; matplotlib hides labels that begin with an underscore."""
    text = " ".join(clean(text).split())
    text = text if len(text) <= 28 else f"{text[:14]}…{text[-13:]}"
    return f" {text}" if text.startswith("_") else text


def _error(found: dict, scale: float) -> list[list[float]] | None:
    """Distances to the ends of an interval, as matplotlib wants them; None without one."""
    if found["low"] is None:
        return None
    return [[max(0.0, scale * (found["mean"] - found["low"]))], [max(0.0, scale * (found["high"] - found["mean"]))]]


def _log2(axes: Axes, values: Sequence[int]) -> None:
    """A doubling axis with a tick at each value."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(values))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, under them."""
    entries = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 6), frameon=False)


def _cycle(items: Sequence[str]) -> Sequence[str]:
    return [items[at % len(items)] for at in range(64)]
