"""Everything that bench/RESULTS.md says about quality, in one command: tables of methods, the sweep over m, incidents, the self-check.

    python bench/quality.py --data DIR [--rows 200] [--out runs/quality] [--only nq_open,sweep,timing,incidents,self_check]

Each step is a run of `python -m minips.evaluate` in a folder of its own and goes on where it was stopped. At the end the section
"Quality" of bench/RESULTS.md is written anew from what the folders hold, and the plots are copied to bench/plots/.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from minips.evaluate import main as evaluate

HERE = Path(__file__).parent
RESULTS, PLOTS = HERE / "RESULTS.md", HERE / "plots"
START, END = "<!-- quality: written by bench/quality.py -->", "<!-- quality: end -->"
TASKS = ("nq_open", "hotpotqa", "squad", "strategyqa", "kv_retrieval", "arc_challenge")
LONGER = {"kv_retrieval": ["--answer-tokens", "48"]}  # a UUID is 33 tokens
METHODS = "parallel,text,text_turn,single,summary,reuse,ape,naive,best_of_n"
SWEEP_PLOTS = ("nll_by_m.png", "timing_by_m.png", "attention.png", "attention_entropy.png")


def steps(rows: int) -> dict[str, list[str]]:
    """Arguments of each step. Answers are capped at 32 tokens (kv_retrieval: 48); the workers of arc_challenge write at most 128."""
    short = ["--answer-tokens", "32", "--worker-tokens", "128", "--batch", "10"]
    sweep = ["--rows", str(max(rows // 2, 1)), "--workers", "1,2,4,8,16", "--attention", "--plot"]
    incidents = ["--rows", str(max(rows // 2, 1)), "--workers", "5", "--answer-tokens", "64", "--worker-tokens", "96"]
    return {
        **{task: ["--task", task, "--method", METHODS, "--rows", str(rows), *short, *LONGER.get(task, [])] for task in TASKS},
        "sweep": ["--task", "nq_open", "--method", "parallel,text,reuse", *short, *sweep],
        "timing": ["--timing", "64,256", "--workers", "1,2,4,8,16", "--plot"],
        "incidents": ["--task", "database_synthetic", "--method", "parallel,text,text_turn", *incidents],
        "self_check": ["--self-check", "--workers", "2,4,8", "--rows", "8"],
    }


def value(estimate: dict | None, scale: float = 1.0, digits: int = 1, sign: bool = False) -> str:
    """A mean with its interval."""
    if estimate is None:
        return "–"
    form = f"{{:{'+' if sign else ''}.{digits}f}}"
    mean = form.format(estimate["mean"] * scale)
    if estimate["low"] is None:
        return mean
    return f"{mean} [{form.format(estimate['low'] * scale)}, {form.format(estimate['high'] * scale)}]"


def grid(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def read(folder: Path, name: str) -> dict | list | None:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def methods_section(summary: dict, title: str) -> str:
    """One table a task: the metric, the NLL, and the paired differences to text."""
    parts = [f"### {title}\n"]
    for table in summary["tables"]:
        metrics, rows = table["metrics"], []
        for name, found in table["methods"].items():
            gaps = found.get("differences", {})
            cells = [value(found["scores"][metric], 100) for metric in metrics]
            rows.append(
                [
                    name,
                    *cells,
                    value(gaps.get(metrics[0]), 100, sign=True),
                    value(found["nll"], digits=2),
                    value(gaps.get("nll"), digits=2, sign=True),
                ]
            )
        head = ["method", *(f"{metric}, %" for metric in metrics), f"{metrics[0]} - text", "NLL", "NLL - text"]
        errors = f", {table['errors']} could not be run and count as wrong" if table["errors"] else ""
        parts.append(f"**{table['task']}**, m = {table['m']}, {table['rows']} rows{errors}\n\n{grid(head, rows)}")
    return "\n".join(parts)


def sweep_section(summary: dict, timing: list | None, attention: dict | None) -> str:
    parts = ["### How quality, cost and attention move with m (nq_open)\n"]
    names = list(summary["tables"][0]["methods"])
    head = ["m", "rows", *(f"{name}: {what}" for name in names for what in ("EM, %", "NLL"))]
    rows = []
    for table in summary["tables"]:
        cells = [
            text
            for name in names
            for text in (value(table["methods"][name]["scores"]["em"], 100), value(table["methods"][name]["nll"], digits=2))
        ]
        rows.append([str(table["m"]), str(table["rows"]), *cells])
    parts.append(grid(head, rows))
    if timing:
        rows = [
            [
                str(e["m"]),
                str(e["branch_tokens"]),
                e["method"],
                f"{e['ttft']['median'] * 1000:.0f}",
                f"{e['ttft']['p95'] * 1000:.0f}",
                f"{e['end_to_end']:.2f}",
                f"{e['kv_mb']:.0f}",
                f"{e['peak_mb']:.0f}",
            ]
            for e in timing
        ]
        parts.append("16 tokens of answer, medians of 5 alternating repeats:\n")
        parts.append(
            grid(["m", "tokens a branch", "method", "TTFT, ms", "p95", "end to end, s", "KV pages, MB", "peak of the process, MB"], rows)
        )
    if attention:
        rows = []
        for entry in attention["sweep"]:
            layers = len(entry["prefix"])
            shares = [sum(entry["prefix"]) / layers, sum(map(sum, entry["branches"])) / layers, sum(entry["self"]) / layers]
            rows.append(
                [
                    str(entry["m"]),
                    *(f"{share:.1%}" for share in shares),
                    f"{sum(entry['entropy']) / layers:.2f}",
                    f"{entry['max_entropy']:.2f}",
                ]
            )
        parts.append("Attention of u's tokens, means over layers, heads and rows:\n")
        parts.append(grid(["m", "prefix", "branches", "u itself", "entropy over branches, nats", "its maximum"], rows))
    parts += [f"![{name}](plots/{name})" for name in SWEEP_PLOTS if (PLOTS / name).exists()]
    return "\n".join(parts) + "\n"


def check_section(check: dict) -> str:
    rows = [
        [
            c["name"],
            str(c["positions"]),
            f"{c['kl_mean']:.2g}",
            f"{c['kl_max']:.2g}",
            f"{c['top1']:.1%}",
            f"{c['bound']} {c['mark']:g}",
            "yes" if c["passed"] else "NO",
        ]
        for c in check["cases"]
    ]
    head = ["case", "positions", "mean KL", "largest", "top-1", "mark of the mean", "held"]
    return "### Self-check: merged caches against the plain sequence, fp32\n\n" + grid(head, rows)


def together(out: Path) -> None:
    """The rows of all tasks in one folder, with a report of their own."""
    done = [out / task for task in TASKS if (out / task / "preds.jsonl").exists()]
    if done:
        (out / "tables").mkdir(exist_ok=True)
        shutil.copyfile(done[0] / "run.json", out / "tables" / "run.json")
        (out / "tables" / "preds.jsonl").write_text("".join((folder / "preds.jsonl").read_text() for folder in done))
        evaluate(["--report", "--plot", "--out", str(out / "tables"), "--quiet"])


def write_section(out: Path) -> None:
    """Replace the part of RESULTS.md between the marks."""
    parts = ["## Quality, untrained\n"]
    together(out)
    run = read(out / "tables", "run.json") or {}
    said = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    parts.append(
        f"`python bench/quality.py --data DIR`, started {run.get('started', '?')[:10]}; {said}. 95% intervals in brackets; differences are paired.\n"
    )
    PLOTS.mkdir(exist_ok=True)
    for folder, names in (("sweep", SWEEP_PLOTS), ("timing", SWEEP_PLOTS), ("tables", ("methods.png",))):
        for name in names:
            if (out / folder / name).exists():
                shutil.copyfile(out / folder / name, PLOTS / name)
    if tables := read(out / "tables", "summary.json"):
        parts.append(methods_section(tables, "Methods on the same branches"))
        parts += ["![methods](plots/methods.png)\n"] * (PLOTS / "methods.png").exists()
    if sweep := read(out / "sweep", "summary.json"):
        parts.append(sweep_section(sweep, read(out / "timing", "sweep.json"), read(out / "sweep", "attention.json")))
    if incidents := read(out / "incidents", "summary.json"):
        parts.append(methods_section(incidents, "Synthetic database incidents, five monitors"))
    if check := read(out / "self_check", "self_check.json"):
        parts.append(check_section(check))
    write_between(START, END, "\n".join(parts))


def write_between(start: str, end: str, text: str, path: Path = RESULTS) -> None:
    """Replace the part of a Markdown file between two marks, or add it at the end."""
    before, _, rest = path.read_text().partition(start)
    after = rest.partition(end)[2] if rest else ""
    path.write_text(before.rstrip() + f"\n\n{start}\n" + text.strip() + f"\n{end}" + (after or "\n"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the data folder")
    parser.add_argument("--rows", type=int, default=200, help="of each task (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--only", help="steps, with commas; none runs nothing and only writes the section")
    args = parser.parse_args()
    chosen = steps(args.rows) if args.only is None else {name: steps(args.rows)[name] for name in args.only.split(",") if name != "none"}
    for name, arguments in chosen.items():
        print(f"== {name}", file=sys.stderr, flush=True)
        if code := evaluate([*arguments, "--data", args.data, "--out", str(args.out / name)]):
            return code
    write_section(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
