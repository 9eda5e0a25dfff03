"""Where a method fails: its metric by group (sub-task kind, number and kind of causes) and by the length of the branches it read."""

from __future__ import annotations

from collections.abc import Iterable

EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048)  # mean tokens a branch, lower ends of the buckets


def failures(rows: Iterable[dict]) -> dict:
    """{task: {method: {"all": cell, "by_group": {group: cell}, "by_length": {bucket: cell}}}} of rows as `records.py` describes them.

    A cell: n rows and the mean of the task's own metric (`metric`, the first of a method's scores; 0 to 1). Groups are sorted by name,
    buckets by length: "32-63" holds rows whose branches have 32 to 63 tokens on average. A method without scores in a row (it
    was not run there) is left out of that row; a row without branch tokens is in no bucket. Rows of several m are not told
    apart: filter them first.
    """
    sums: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    for row in rows:
        for method, made in row.get("methods", {}).items():
            if not made.get("scores"):
                continue
            score = float(next(iter(made["scores"].values())))
            tables = sums.setdefault(row["task"], {}).setdefault(method, {"all": {}, "by_group": {}, "by_length": {}})
            tables["all"].setdefault("", []).append(score)
            tables["by_group"].setdefault(row.get("group") or "(none)", []).append(score)
            if tokens := made.get("branch_tokens"):
                tables["by_length"].setdefault(bucket(sum(tokens) / len(tokens)), []).append(score)
    return {
        task: {
            method: {
                "all": _cell(tables["all"][""]),
                "by_group": {name: _cell(tables["by_group"][name]) for name in sorted(tables["by_group"])},
                "by_length": {name: _cell(tables["by_length"][name]) for name in map(bucket, EDGES) if name in tables["by_length"]},
            }
            for method, tables in methods.items()
        }
        for task, methods in sums.items()
    }


def bucket(tokens: float) -> str:
    """The bucket's name, its first and last number of tokens: "32-63"; "2048-" is open."""
    at = max(index for index, edge in enumerate(EDGES) if tokens >= edge)
    return f"{EDGES[at]}-{EDGES[at + 1] - 1 if at + 1 < len(EDGES) else ''}"


def _cell(scores: list[float]) -> dict[str, float | int]:
    return {"n": len(scores), "metric": sum(scores) / len(scores)}
