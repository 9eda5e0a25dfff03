"""The report of a run folder: `summary.json` for programs, `report.md` and a self-contained `report.html` for people.

It shows what the folder holds: the rows of preds.jsonl, and sweep.json, attention.json, self_check.json and the plots where they
are there. The paper's figures stand in a section of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import MinipsError
from ..files import write_beside
from ..reading import read_json
from .document import Block, Heading, Image, Strong, Table, Text, to_html, to_markdown
from .measurements import read_attention, read_self_check, read_sweep
from .plots import PLOTS
from .records import PREDS, RUN, read_rows
from .samples import samples
from .summary import summarise

SUMMARY, MARKDOWN, PAGE = "summary.json", "report.md", "report.html"
PUBLISHED_TTFT = {512: 2.5, 1024: 4.8, 2048: 7.3, 4096: 11.0}  # tokens a branch: TTFT of text over parallel, of the paper, GPU
NONE = "–"
HOW_TO_READ = (
    "Scores are in percent; NLL is the mean over rows of the reference answer's nats a token (lower is better). In brackets: 95% "
    "intervals. Where every row is right or wrong, they are Wilson's, and Bonett and Price's for paired differences; elsewhere they are "
    "percentile bootstraps over the rows (10,000 resamples), or (–) where fewer than 10 rows or equal values allow none. Differences are "
    "paired: the same rows, the same branches. Bold: the interval leaves out zero; of twenty such intervals about one does so by chance."
)


def write_report(folder: str | Path, baseline: str = "text") -> list[Path]:
    """Write all three files of a run folder anew; returns their paths. baseline: the method that the others are compared with."""
    folder = Path(folder)
    sweep, attention, check = read_sweep(folder), read_attention(folder), read_self_check(folder)
    rows = read_rows(folder) if (folder / PREDS).exists() else []
    if not (rows or sweep or attention or check):
        raise MinipsError(f"{folder}: nothing to report; expected rows in {PREDS}, or sweep.json, attention.json or self_check.json")
    run = read_json(folder / RUN) if (folder / RUN).exists() else {}
    summary = summarise(rows, baseline)
    blocks = [Heading("minips evaluation", 1), *_run(run, summary)]
    blocks += _overview(summary) if rows else []
    blocks += [block for table in summary["tables"] for block in _task(table, baseline)]
    blocks += _by_m(summary["tables"])
    blocks += _timing(sweep) if sweep else []
    blocks += _attention(attention) if attention and attention["sweep"] else []
    blocks += _self_check(check) if check and check["cases"] else []
    blocks += _plots(folder)
    blocks += _published(sweep or [])
    blocks += samples(rows)
    title = f"minips evaluation, {folder.resolve().name}"
    contents = {SUMMARY: json.dumps({"run": run, **summary}, indent=1) + "\n", MARKDOWN: to_markdown(blocks), PAGE: to_html(blocks, title)}
    for name, content in contents.items():
        write_beside(folder / name, content)
    return [folder / name for name in contents]


def _run(run: dict, summary: dict) -> list[Block]:
    """What was run, on what, and for how long."""
    lines = [(key, run[key]) for key in ("started",) if key in run]
    for part in ("arguments", "versions", "machine"):
        for name, value in (run.get(part) or {}).items():
            if value not in (None, "", []):
                lines.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    seconds = summary["seconds"]
    if summary["rows"]:
        lines.append(("time spent", f"{_duration(seconds['workers'])} on workers, {_duration(seconds['methods'])} on methods"))
    return [Table(("run", ""), lines, left=2)] if lines else []


def _overview(summary: dict) -> list[Block]:
    names = list(dict.fromkeys(name for table in summary["tables"] for name in table["methods"]))
    rows = []
    for table in summary["tables"]:
        metric = table["metrics"][0] if table["metrics"] else ""
        cells = [_short(table["methods"].get(name), metric) for name in names]
        rows.append((table["task"], metric, str(table["m"]), str(table["rows"]), *cells))
    compared = f"▲ and ▼: above and below {summary['baseline']}, by more than the paired 95% interval. " if len(names) > 1 else ""
    few = min(table["rows"] for table in summary["tables"])
    warning = f" With fewer than 30 rows (here {few}) bootstraps come out too narrow." if few < 30 else ""
    return [
        Heading("Overview"),
        Text(f"Each task's own metric in percent. {compared}m is the number of workers."),
        Table(("task", "metric", "m", "rows", *names), rows, left=2),
        Text(HOW_TO_READ + warning),
    ]


def _short(method: dict | None, metric: str) -> str:
    score = method and method["scores"].get(metric)
    if not score:
        return NONE
    mark = _direction(method.get("differences", {}).get(metric))
    return f"{100 * score['mean']:.1f}{' ' + '▼▲'[mark > 0] if mark else ''}"


def _task(table: dict, baseline: str) -> list[Block]:
    workers, seconds = table["workers"], table["seconds"]
    said = f"{table['rows']} rows"
    if workers["number"]:
        ended = ", ".join(f"{reason} {count}" for reason, count in workers["finish_reasons"].items())
        size = f"{workers['tokens']:.0f} tokens each on average (longest {workers['longest']})"
        said += f"; {workers['number']:.1f} branches a row, {size}; ended by: {ended}"
    said += f". Time: {_duration(seconds['workers'])} on workers, {_duration(seconds['methods'])} on methods."
    if table["errors"]:
        said += f" Rows that could not be run: {table['errors']}; they count as wrong and have no NLL."
    if baseline not in table["methods"]:
        said += f" {baseline} was not run, so there are no paired differences."
    heading, failing = Heading(f"{table['task']}, m = {table['m']}"), _failing(table)
    if not table["methods"]:
        return [heading, Text(said)]
    costs = [Text("What an answer took, mean a row, and how it ended:"), _costs(table)]
    return [heading, Text(said), _scores(table), *_differences(table, baseline), *costs, *failing]


def _failing(table: dict) -> list[Block]:
    """The task's own metric by group of rows and by branch length, where there is more than one."""
    found, tables = table["failures"], []
    for part, title in (("by_group", "group"), ("by_length", "tokens a branch")):
        names = list(dict.fromkeys(name for method in found.values() for name in method[part]))
        names.sort(key=lambda name: int(name.split("-")[0]) if part == "by_length" else 0)
        cells = {name: [_cell(method[part].get(name)) for method in found.values()] for name in names}
        if len(names) > 1:
            tables.append(Table((title, *found), [(name, *cells[name]) for name in names]))
    return (
        [Text(f"{table['metrics'][0]} in percent by kind of row and mean branch length; in brackets the number of rows:"), *tables]
        if tables
        else []
    )


def _cell(cell: dict | None) -> str:
    return f"{100 * cell['metric']:.1f} ({cell['n']})" if cell else NONE


def _scores(table: dict) -> Table:
    metrics = table["metrics"]
    rows = []
    for name, method in table["methods"].items():
        scores = [_interval(method["scores"][metric], 100, 1, table["rows"]) for metric in metrics]
        rows.append([name, *scores, _interval(method["nll"], 1, 2, table["rows"])])
    return Table(("method", *metrics, "NLL"), rows)


def _differences(table: dict, baseline: str) -> list[Block]:
    """Paired with the baseline, if that and another method were run."""
    metrics, rows = table["metrics"], []
    for name, method in table["methods"].items():
        found = method.get("differences")
        if found and baseline in table["methods"]:
            changes = [_change(found.get(metric), 100, 1) for metric in metrics] + [_change(found.get("nll"), 1, 2)]
            first = found.get(metrics[0]) if metrics else None
            rows.append([name, *changes, f"{first['higher']} / {first['lower']}" if first else NONE])
    header = ("method", *metrics, "NLL", f"rows with {metrics[0] if metrics else 'it'} above / below")
    return [Text(f"Paired difference to {baseline}, in percentage points and nats:"), Table(header, rows)] if rows else []


def _costs(table: dict) -> Table:
    """What the answers cost, a row, and how they ended."""
    methods = table["methods"]
    reasons = list(dict.fromkeys(reason for method in methods.values() for reason in method["finish_reasons"]))
    header = [
        "method",
        "answer tokens",
        "prefilled tokens",
        "reused tokens",
        "seconds",
        *(f"ended: {reason}" for reason in reasons),
        "no answer found",
    ]
    rows = []
    for name, method in methods.items():
        costs = [_figure(method[key], 1) for key in ("answer_tokens", "prefilled_tokens", "reused_tokens")]
        counts = [str(method["finish_reasons"].get(reason, 0)) for reason in reasons]
        rows.append([name, *costs, _figure(method["seconds"], 2), *counts, str(method["no_answer"])])
    return Table(header, rows)


def _by_m(tables: Sequence[dict]) -> list[Block]:
    """Score and NLL of each method as m grows, of tasks that were run with several m."""
    blocks: list[Block] = []
    for task in dict.fromkeys(table["task"] for table in tables):
        own = [table for table in tables if table["task"] == task]
        if len(own) < 2 or not own[0]["metrics"]:
            continue
        metric, header = own[0]["metrics"][0], ("method", *(f"m = {table['m']}" for table in own))
        names = list(dict.fromkeys(name for table in own for name in table["methods"]))
        entries = {name: [table["methods"].get(name) for table in own] for name in names}
        scores = [(name, *(_interval(e and e["scores"].get(metric), 100, 1) for e in entries[name])) for name in names]
        nlls = [(name, *(_interval(e and e["nll"], 1, 2) for e in entries[name])) for name in names]
        blocks += [Heading(f"{task} as m grows"), Text(f"{metric}, in percent:"), Table(header, scores), Text("NLL:"), Table(header, nlls)]
    return blocks


def _timing(sweep: Sequence[dict]) -> list[Block]:
    rows = []
    for entry in sorted(sweep, key=lambda entry: (entry["branch_tokens"], entry["m"], entry["method"])):
        ttft, ratio = entry["ttft"], _ratio(sweep, entry["m"], entry["branch_tokens"])
        costs = [_figure(ttft["median"], 3), _figure(ttft.get("p95"), 3), str(ttft.get("n", NONE)), _figure(entry.get("end_to_end"), 2)]
        faster = f"{ratio:.2f}" if ratio and entry["method"] == "parallel" else ""
        rows.append(
            (
                entry["method"],
                str(entry["m"]),
                str(entry["branch_tokens"]),
                *costs,
                _figure(entry.get("peak_mb"), 0),
                _figure(entry.get("kv_mb"), 1),
                faster,
            )
        )
    header = (
        "method",
        "m",
        "tokens a branch",
        "TTFT s, median",
        "p95",
        "runs",
        "end to end s",
        "peak MB",
        "cache MB",
        "text TTFT / parallel TTFT",
    )
    about = "TTFT: seconds from the synthesizer's call to its first token, the workers being done. End to end: workers and answer."
    return [Heading("Time and memory, measured here"), Text(about), Table(header, rows)]


def _ratio(sweep: Sequence[dict], m: int, branch_tokens: int) -> float | None:
    """Median TTFT of text over that of parallel, where both were measured."""
    found = {e["method"]: e["ttft"]["median"] for e in sweep if (e["m"], e["branch_tokens"]) == (m, branch_tokens)}
    return found["text"] / found["parallel"] if {"text", "parallel"} <= found.keys() and found["parallel"] > 0 else None


def _attention(data: dict) -> list[Block]:
    """Means over the layers; the plots show them layer by layer."""
    rows = []
    for entry in data["sweep"]:
        branches = [sum(column) / len(column) for column in zip(*entry["branches"])]
        most = entry["max_entropy"]
        spread = (f"{100 * min(branches):.1f} to {100 * max(branches):.1f}", f"{_average(entry['entropy']) / most:.3f}" if most else NONE)
        shares = [f"{100 * share:.1f}" for share in (_average(entry["prefix"]), sum(branches), _average(entry["self"]))]
        rows.append((str(entry["m"]), *shares, *spread))
    header = ("m", "prefix %", "all branches %", "itself %", "one branch % (least to most)", "entropy / maximum")
    about = (
        "Where the synthesizer's attention goes, mean over layers. Entropy over the branches against its maximum, log m: 1 means that "
        "all branches get the same share."
    )
    return [Heading("Attention shares"), Text(f"{about} Model: {data.get('model', NONE)}."), Table(header, rows)]


def _self_check(data: dict) -> list[Block]:
    rows = []
    for case in data["cases"]:
        figures = [f"{case['kl_mean']:.2e}", f"{case['kl_max']:.2e}", f"{100 * case['top1']:.1f}"]
        mark = f"{case.get('bound', 'at most')} {case['mark']:.0e}"
        passed = "passed" if case["passed"] else Strong("failed")
        rows.append((case.get("name", f"m = {case['m']}"), *map(str, (case["m"], case["rows"], case["positions"])), *figures, mark, passed))
    header = ("case", "m", "prompts", "positions", "KL mean", "KL max", "same top-1 %", "mark for the mean", "result")
    about = "The merged caches against the plain sequence with the same weights."
    made = f"Model: {data.get('model', NONE)}, adapter: {data.get('adapter') or 'none'}."
    return [Heading("Self-check"), Text(f"{about} {made}"), Table(header, rows)]


def _plots(folder: Path) -> list[Block]:
    """The plots that are there and not older than what they show."""
    sources = [path for name in (PREDS, "sweep.json", "attention.json") if (path := folder / name).exists()]
    newest = max((path.stat().st_mtime_ns for path in sources), default=0)
    there = {name: text for name, text in PLOTS.items() if (folder / name).exists()}
    fresh = [Image(folder / name, text) for name, text in there.items() if (folder / name).stat().st_mtime_ns >= newest]
    left = [Text("Plots older than the data were left out; draw them anew.")] if len(fresh) < len(there) else []
    return [Heading("Plots"), *fresh, *left] if there else []


def _published(sweep: Sequence[dict]) -> list[Block]:
    rows = [(f"{n:,}", f"{value}", _figure(_ratio(sweep, 4, n), 2)) for n, value in PUBLISHED_TTFT.items()]
    about = (
        "The paper (arXiv 2606.14672) reports equal quality at 2.5 to 11 times lower TTFT than the text interface, on GPUs and with "
        "trained adapters. No published accuracies by task are at hand, so every quality figure in this report is ours, and none is "
        "compared with the paper's."
    )
    header = ("tokens a branch", "text TTFT / parallel TTFT: paper, GPU, not measured here", "measured here, m = 4")
    return [Heading("Published, not measured here"), Text(about), Table(header, rows)]


def _direction(change: dict | None) -> int:
    """1 or -1 where the interval of a difference lies above or below zero, else 0."""
    if not change or change["low"] is None:
        return 0
    return 1 if change["low"] > 0 else -1 if change["high"] < 0 else 0


def _interval(estimate: dict | None, scale: float, digits: int, rows: int | None = None) -> str:
    """mean (low to high); with the number of rows where that is not `rows`."""
    if not estimate:
        return NONE
    few = f", {estimate['n']} rows" if rows is not None and estimate["n"] != rows else ""
    bounds = [estimate["low"], estimate["high"]]
    spread = NONE if None in bounds else " to ".join(f"{scale * bound:.{digits}f}" for bound in bounds)
    return f"{scale * estimate['mean']:.{digits}f} ({spread}{few})"


def _change(change: dict | None, scale: float, digits: int) -> str:
    """Like an interval, with signs; strong where it leaves out zero."""
    if not change:
        return NONE
    spread = NONE if change["low"] is None else f"{scale * change['low']:+.{digits}f} to {scale * change['high']:+.{digits}f}"
    text = f"{scale * change['mean']:+.{digits}f} ({spread})"
    return Strong(text) if _direction(change) else text


def _figure(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
