"""The speed plots, with matplotlib (extra `plot`), which is imported only when something is drawn."""

from __future__ import annotations

import io
import os
from pathlib import Path

from measure import warm

from minips import MinipsError
from minips.command import require_matplotlib

PUBLISHED = {512: 2.5, 1024: 4.8, 2048: 7.3, 4096: 11.0}  # arXiv 2606.14672: text / parallel on a GPU, four branches, by tokens a branch
BARS = (("published (GPU)", "#999999"), ("ours", "#0072B2"), ("FLOP limit", "#E69F00"))


def bars_of(data: dict) -> dict[int, dict[str, float]]:
    """Tokens a branch -> published, ours and limit, of the cases with four branches; of several |u| the one nearest to 128."""
    found: dict[int, dict] = {}
    for case in sorted(data["cases"], key=lambda case: -abs(case["u"] - 128)):
        if case["m"] == 4 and {"text", "parallel"} <= set(case["methods"]):
            medians = {name: warm(case["methods"][name], "ttft")["median"] for name in ("text", "parallel")}
            found[case["length"]] = {"ours": medians["text"] / medians["parallel"], "FLOP limit": case["limit"]}
            if case["length"] in PUBLISHED:
                found[case["length"]]["published (GPU)"] = PUBLISHED[case["length"]]
    return dict(sorted(found.items()))


def write_ttft_plot(path: Path, data: dict) -> None:
    """The paper's bars with ours and the limit beside them, as a PNG. MinipsError without matplotlib or without a case to draw."""
    require_matplotlib()
    from matplotlib.figure import Figure

    bars = bars_of(data)
    if not bars:
        raise MinipsError("--plot: no case with four branches, parallel and text was measured, so there is nothing to draw")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for at, (name, colour) in enumerate(BARS):
        if not any(name in values for values in bars.values()):
            continue
        places = [(spot + (at - 1) * 0.27, values[name]) for spot, values in enumerate(bars.values()) if name in values]
        drawn = axes.bar([x for x, _ in places], [height for _, height in places], 0.26, label=name, color=colour)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(bars)), [str(length) for length in bars])
    axes.set_xlabel("tokens a branch")
    axes.set_ylabel("TTFT text / TTFT parallel")
    axes.set_title(f"Four branches, {data['model']['name']}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(image.getvalue())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise MinipsError(f"{path}: cannot be written ({error.strerror or error})") from None
