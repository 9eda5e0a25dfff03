"""From branches to one context: which tokens are kept, where they go, and what must be copied. CONTRACT.md sections 3 to 5.

`plan_merge` decides everything and refuses what cannot be done before a page is touched; `apply_plan` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .config import MergeOptions
from .errors import MinipsError
from .kv_cache import Branch, KVPool, Segment
from .mapper import CacheMapper
from .rope import Rope
from .transform import Job, Transform

MAX_MOVES = 8  # rotations that a 16-bit key may go through: each rounds once more


@dataclass(frozen=True)
class Piece:
    """`length` tokens of a segment from token `first` on, to stand at positions from `start` on."""

    segment: Segment
    first: int
    length: int
    start: int

    @property
    def delta(self) -> int:
        """Positions that the keys move by."""
        return self.start - (self.segment.start + self.first)


@dataclass
class Plan:
    """What a merge will do. `pieces[j]` are the kept pieces of the j-th branch that is not empty."""

    prefix: list[Segment]
    prefix_ids: list[int]
    pieces: list[list[Piece]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)  # positions that each kept branch covers
    next_position: int = 0
    skipped: list[int] = field(default_factory=list)

    @property
    def branch_tokens(self) -> list[int]:
        return [sum(piece.length for piece in pieces) for pieces in self.pieces]


def shared_prefix(branches: Sequence[Branch]) -> list[Segment]:
    """c_sh: the leading segments that all branches share by identity, as far as each inherited them by its fork."""
    run: list[Segment] = []
    for index in range(min((branch.fork_depth for branch in branches), default=0)):
        segment = branches[0].segments[index]
        if any(branch.segments[index] is not segment for branch in branches):
            break
        run.append(segment)
    return run


def plan_merge(
    branches: Sequence[Branch], options: MergeOptions, limit: int, prefix: Branch | None = None, *, lossy: bool = True
) -> Plan:
    """Decide a merge. limit: the model's number of positions. lossy: keys are stored in 16 bits or fewer.

    prefix: c_sh where there are no branches to tell it.
    """
    shared = shared_prefix(branches) if branches else list(prefix.segments) if prefix is not None else []
    fork_point = shared[-1].start + shared[-1].length if shared else 0
    if options.keep_prefix and not shared:
        raise MinipsError(
            "merge: keep_prefix is on, but these branches share no prefix; fork them from one engine.prefill(...) "
            "or use MergeOptions(keep_prefix=False)"
        )
    kept = shared if options.keep_prefix else []
    owner = branches[0] if branches else prefix
    plan = Plan(list(kept), owner.token_ids[: sum(segment.length for segment in kept)] if kept else [])
    for index, branch in enumerate(branches):
        depth = 0 if options.keep_turns == "full" else len(shared)
        if options.keep_turns == "all" and options.profile == "official":
            depth = branch.fork_depth  # the release drops each worker's own system text
        pieces, span, tokens = _kept_pieces(branch, depth, options, index)
        if not pieces:
            plan.skipped.append(index)
            continue
        plan.pieces.append(pieces)
        plan.token_ids += tokens
        plan.spans.append(span)
    if branches and not plan.pieces:
        raise MinipsError(f"merge: all {len(branches)} branches are empty (each stopped at once), so there is nothing to merge")
    _place(plan, options, fork_point)
    if plan.next_position > limit:
        raise MinipsError(f"merge: the merged branches end at position {plan.next_position}, the model's limit is {limit}")
    for piece in (piece for pieces in plan.pieces for piece in pieces):
        if lossy and piece.delta and piece.segment.moves >= MAX_MOVES:
            moves = piece.segment.moves
            raise MinipsError(f"merge: a segment's keys were rotated {moves} times, the limit is {MAX_MOVES} for this KV dtype")
    return plan


def _kept_pieces(branch: Branch, depth: int, options: MergeOptions, index: int) -> tuple[list[Piece], int, list[int]]:
    """Kept pieces of one branch, laid out from position 0; their span in positions; their token ids."""
    segments, own = branch.segments, range(depth, len(branch.segments))
    outputs = [i for i in own if segments[i].role == "output"]
    everything = options.keep_turns in ("all", "full")
    if not outputs and not everything:
        raise MinipsError(f"merge: branch {index} has no output; call engine.decode or engine.encode first")
    groups: list[list[int]] = []  # runs of adjacent kept segments
    for i in own if everything else outputs:
        if groups and groups[-1][-1] == i - 1:
            groups[-1].append(i)
        else:
            groups.append([i])
    if options.keep_turns == "final":
        groups = groups[-1:]
    starts = [0]  # index of each segment's first token in branch.token_ids
    for segment in segments:
        starts.append(starts[-1] + segment.length)
    pieces: list[Piece] = []
    tokens: list[int] = []
    origin = segments[groups[0][0]].start if groups else 0
    cursor = end = 0
    keep_stop = options.keep_stop_token and options.profile == "minips"
    for group in groups:
        first, last = segments[group[0]], segments[group[-1]]
        shift = cursor - first.start if options.keep_turns == "compact" else -origin
        drop = 0
        if options.profile == "official" and not everything and last.ended != "given":
            before = segments[group[0] - 1] if group[0] else None
            if before is not None and before.length:
                pieces.append(Piece(before, before.length - 1, 1, before.start + before.length - 1 + shift))
                tokens.append(branch.token_ids[starts[group[0]] - 1])
            drop = int(last.ended in ("length", "stop_string"))
        if options.profile == "official" and not everything:  # the span counts every token made, an ending one included
            made = sum(segments[i].length for i in group) + (last.ended == "stop")
            end = max(end, first.start + shift + made)
        empty = not any(segments[i].length for i in group)
        for i in group:
            segment = segments[i]
            ids = branch.token_ids[starts[i] : starts[i + 1]]
            if segment is last and drop:
                ids = ids[:-1]
            elif segment is last and keep_stop and not empty and segment.stop_token is not None:
                ids = [*ids, segment.stop_token]
            length = len(ids)
            if length:
                pieces.append(Piece(segment, 0, length, segment.start + shift))
                tokens += ids
                end = max(end, segment.start + shift + length)
        cursor = end
    slots = sum(piece.length for piece in pieces)
    return pieces, max(end, slots) if options.profile == "official" else end, tokens


def _place(plan: Plan, options: MergeOptions, fork_point: int) -> None:
    """Move the pieces from position 0 to where the layout puts them; sets `next_position`."""
    spans = plan.spans
    offsets = [sum(spans[:j]) if options.layout == "sequential" else 0 for j in range(len(spans))]
    width = sum(spans) if options.layout == "sequential" else max(spans, default=0)
    if not options.rerotate:
        olds = [piece.segment.start + piece.first for pieces in plan.pieces for piece in pieces]
        lengths = [piece.length for pieces in plan.pieces for piece in pieces]
        plan.pieces = [
            [Piece(p.segment, p.first, p.length, p.segment.start + p.first) for p in pieces] for pieces in plan.pieces
        ]
        plan.next_position = max([fork_point, *(old + length for old, length in zip(olds, lengths))])
        return
    if options.anchor == "free":
        wishes = Counter(-pieces[0].delta - offset for pieces, offset in zip(plan.pieces, offsets))
        wishes = {anchor: count for anchor, count in wishes.items() if anchor >= 0} or {0: 0}
        anchor = min(wishes, key=lambda value: (-wishes[value], value))
    else:
        anchor = fork_point if options.anchor == "fork" else 0
    plan.pieces = [
        [Piece(p.segment, p.first, p.length, p.start + anchor + offset) for p in pieces]
        for pieces, offset in zip(plan.pieces, offsets)
    ]
    plan.next_position = anchor + width


def apply_plan(
    plan: Plan, pool: KVPool, rope: Rope, consumed: Sequence[Branch], timings: dict, counters: dict, mapper: CacheMapper | None = None
) -> list[Segment]:
    """Carry out a plan; returns the context's segments, on pages of which the caller holds one count for each entry.

    consumed: branches that the caller closes afterwards; pages that only they hold are changed in place. On an error no page
    is kept; pages changed in place so far belong to the consumed branches.
    """
    held = Counter(id(segment) for branch in consumed for segment in branch.segments)
    keys = _keys(plan)
    pieces = {key: piece for row, names in zip(plan.pieces, keys) for piece, key in zip(row, names)}
    twins = [keys.index(names) for names in keys]
    branch_of = {key: twins[index] for index, names in enumerate(keys) for key in names}
    transform = Transform(pool, rope, mapper, plan.spans, plan.branch_tokens, twins)
    variants = Counter(id(piece.segment) for piece in pieces.values())
    kept_prefix = set(map(id, plan.prefix))

    def in_place(piece: Piece) -> bool:
        alone = id(piece.segment) not in kept_prefix
        alone = alone and all(pool.ref_count[page] == held[id(piece.segment)] for page in piece.segment.pages)
        return piece.first == 0 and (not transform.changes(piece.delta) or alone and variants[id(piece.segment)] == 1)

    copied = {key for key, piece in pieces.items() if not in_place(piece)}
    pool.require(sum(pool.pages_for(pieces[key].length) for key in copied), "copying shared branch pages")
    made: dict[tuple, Segment] = {}
    result: list[Segment] = []
    try:
        for key, piece in pieces.items():
            old = piece.segment
            if key in copied:
                new = pool.copy(old, piece.first, piece.length)
                counters["copied_tokens"] += piece.length
            else:
                pages = old.pages[: pool.pages_for(piece.length)]
                pool.retain(pages)
                new = Segment(pages, piece.length, old.start, old.role, old.ended)
            made[key] = new
            new.start, new.moves = piece.start, old.moves + transform.changes(piece.delta)
        counters["rerotated_tokens"] += sum(piece.length for piece in pieces.values() if piece.delta)
        jobs = [Job(made[key], piece.delta, branch_of[key]) for key, piece in pieces.items() if transform.changes(piece.delta)]
        transform.apply(jobs, timings)
        for segment in plan.prefix:
            pool.retain(segment.pages)
            result.append(segment)
        for names in keys:
            for key in names:
                pool.retain(made[key].pages)
                result.append(made[key])
    except BaseException:
        for segment in result:
            pool.release(segment.pages)
        raise
    finally:
        for segment in made.values():
            pool.release(segment.pages)
    return result


def _keys(plan: Plan) -> list[list[tuple]]:
    """A name for each piece; equal names mean the same stored tokens brought to the same place by the same map."""
    rows = [tuple((id(p.segment), p.first, p.length, p.start) for p in row) for row in plan.pieces]
    return [[(*name, rows.index(row)) for name in row] for row in rows]
