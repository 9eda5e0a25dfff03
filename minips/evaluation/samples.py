"""Worked samples for the report: what the workers wrote and what each method made of it, one row where they differ before one where not."""

from __future__ import annotations

from collections.abc import Sequence

from .document import Block, Heading, Sample, Text

PER_TASK = 3
MOST_CHARACTERS = 1500  # of a text that is shown; long thoughts say little more


def samples(rows: Sequence[dict]) -> list[Block]:
    """Up to three rows a task, chosen by outcome alone: the first where methods differ, where all are right, where all are wrong."""
    blocks: list[Block] = [_sample(row) for row in _chosen(rows)]
    if not blocks:
        return []
    about = "The first row of each task where the methods differ, where all are right, and where all are wrong. Long texts are cut."
    return [Heading("Worked samples"), Text(about), *blocks]


def _chosen(rows: Sequence[dict]) -> list[dict]:
    chosen: dict[str, dict[str, dict]] = {}
    for row in rows:
        chosen.setdefault(row["task"], {}).setdefault(_outcome(row), row)
    order = ("differ", "right", "wrong", "partly right", "error")
    return [row for found in chosen.values() for row in [found[outcome] for outcome in order if outcome in found][:PER_TASK]]


def _outcome(row: dict) -> str:
    if "error" in row:
        return "error"
    verdicts = {_verdict(method) for method in row["methods"].values()}
    return verdicts.pop() if len(verdicts) == 1 else "differ"


def _verdict(method: dict) -> str:
    """By the task's own metric, the first."""
    value = next(iter(method.get("scores", {}).values()), 0.0)
    return "right" if value == 1 else "wrong" if value == 0 else "partly right"


def _sample(row: dict) -> Sample:
    parts = [("Question", _cut(row.get("question", ""))), ("Accepted answers", _cut("\n".join(map(str, row.get("references", [])))))]
    if "error" in row:
        parts.append(("Could not be run", row["error"]))
    for number, worker in enumerate(row.get("workers", []), 1):
        parts.append((f"Worker {number}: {worker.get('tokens')} tokens, {worker.get('finish_reason')}", _cut(worker.get("text", ""))))
    for name, method in row["methods"].items():
        scores = ", ".join(f"{metric} {value:.2f}" for metric, value in method.get("scores", {}).items())
        found = method.get("extracted")
        label = f"{name}: {_verdict(method)} ({scores}); answer read: {'none' if found is None else _cut(str(found), 80)}"
        parts.append((label, _cut(method.get("text", ""))))
    return Sample(f"{row['task']}, row {row['id']}, m = {row['m']}: {_title(row)}", parts)


def _title(row: dict) -> str:
    outcome = _outcome(row)
    return {"differ": "methods differ", "error": "could not be run"}.get(outcome, f"all {outcome}")


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
