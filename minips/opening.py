"""Roots and the branches on them: what several tasks need before their workers can write, each step as one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import MinipsError
from .kv_cache import Branch
from .prompts import Prompt

if TYPE_CHECKING:
    from .engine import Engine


def open_roots(engine: Engine, prompts: Sequence[Prompt], systems: Sequence[str | None], raw: bool) -> list[Branch]:
    """A root (c_sh) for each prompt."""
    ids = [engine.prompts.encode(prompt, "prefix", raw=raw, system=system) for prompt, system in zip(prompts, systems)]
    if not all(ids):
        raise MinipsError("prompt is empty: it has no tokens")
    roots: list[Branch] = []
    try:
        roots += [engine.empty_branch() for _ in ids]
        engine.append(roots, ids)
    except BaseException:
        _close(roots)
        raise
    for root, prompt in zip(roots, prompts):
        root.raw = raw
        if isinstance(prompt, str) and not raw:
            root.turn = "open" if prompt else "open_empty"
        root.fork_depth = len(root.segments)
    return roots


def open_branches(engine: Engine, prefixes: Sequence[Branch], prompts: Sequence[Sequence[Prompt]]) -> list[list[Branch]]:
    """One branch a prompt on the pages of its prefix (no copy), then every c_br. What is equal on one prefix is computed once."""
    ids = [[tuple(engine.prompts.fork(prefix, prompt)) for prompt in row] for prefix, row in zip(prefixes, prompts)]
    unused = [dict.fromkeys(row) for row in ids]
    firsts: list[tuple[Branch, tuple[int, ...]]] = []
    rows: list[list[Branch]] = []
    try:
        for prefix, distinct in zip(prefixes, unused):
            for row in distinct:
                distinct[row] = prefix.child()
                firsts.append((distinct[row], row))
        engine.append([branch for branch, _ in firsts], [list(row) for _, row in firsts])
        for prefix, row, distinct in zip(prefixes, ids, unused):
            made = dict(distinct)
            rows.append([])
            for prompt in row:
                branch = distinct.pop(prompt, None) or made[prompt].child()
                branch.fork_depth, branch.turn = len(prefix.segments), "assistant"
                rows[-1].append(branch)
    except BaseException:
        _close([branch for branch, _ in firsts])
        for row in rows:
            _close(row)
        raise
    engine.counters["reused_tokens"] += sum(prefix.num_cached * len(row) for prefix, row in zip(prefixes, rows))
    return rows


def _close(branches: Sequence[Branch]) -> None:
    for branch in branches:
        branch.close()
