"""From branches to one context: which tokens are kept, where they go, and what must be copied. CONTRACT.md sections 3 to 5.

`plan_merge` decides everything and refuses what cannot be done before a page is touched; `apply_plan` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .config import MergeOptions
from .errors import MinipsError, RoomError
from .kv_cache import Branch, KVPool, Segment, shared_prefix
from .mapper import CacheMapper
from .merge_kernels import MergeKernels
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


def plan_merge(branches: Sequence[Branch], options: MergeOptions, limit: int, prefix: Branch | None = None, *, lossy: bool = True) -> Plan:
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
    _place(plan, options, fork_point, limit)
    if plan.next_position > limit:
        raise RoomError(f"merge: the merged branches end at position {plan.next_position}, the model's limit is {limit}")
    for piece in (piece for pieces in plan.pieces for piece in pieces):
        if lossy and piece.delta and piece.segment.moves >= MAX_MOVES:
            moves = piece.segment.moves
            raise MinipsError(f"merge: a segment's keys were rotated {moves} times, the limit is {MAX_MOVES} for this KV dtype")
    return plan


def _kept_groups(branch: Branch, depth: int, options: MergeOptions, index: int) -> list[range]:
    """Runs of adjacent segments (as indices) of which tokens are kept; only segments from `depth` on belong to the branch itself."""
    segments = branch.segments
    if options.keep_turns in ("all", "full"):
        return [range(depth, len(segments))] if len(segments) > depth else []
    groups: list[range] = []
    for i in range(depth, len(segments)):
        if segments[i].role == "output":
            adjacent = bool(groups) and groups[-1].stop == i
            groups[-1:] = [range(groups[-1].start, i + 1)] if adjacent else [*groups[-1:], range(i, i + 1)]
    if not groups:
        raise MinipsError(f"merge: branch {index} has no output; call engine.decode or engine.encode first")
    return groups[-1:] if options.keep_turns == "final" else groups


def _kept_pieces(branch: Branch, depth: int, options: MergeOptions, index: int) -> tuple[list[Piece], int, list[int]]:
    """Kept pieces of one branch, laid out from position 0; their span in positions; their token ids."""
    segments, starts = branch.segments, [0]  # starts: index of each segment's first token in branch.token_ids
    for segment in segments:
        starts.append(starts[-1] + segment.length)
    groups = _kept_groups(branch, depth, options, index)
    released_rule = options.profile == "official" and options.keep_turns not in ("all", "full")
    origin = segments[groups[0].start].start if groups else 0
    pieces: list[Piece] = []
    tokens: list[int] = []
    end = 0
    for group in groups:
        last, place = segments[group[-1]], segments[group.start].start
        shift = end - place if options.keep_turns == "compact" else -origin
        ids = [branch.token_ids[starts[i] : starts[i + 1]] for i in group]
        made = sum(map(len, ids))
        if released_rule:
            before = segments[group.start - 1] if group.start else None
            if before is not None and before.length and last.ended != "given":
                pieces.append(Piece(before, before.length - 1, 1, place + shift - 1))
                tokens.append(branch.token_ids[starts[group.start] - 1])
            if last.ended in ("length", "stop_string"):
                ids[-1] = ids[-1][:-1]
            end = max(end, place + shift + made + (last.ended == "stop"))  # a span counts the token that ended it
        elif options.keep_stop_token and options.profile == "minips" and made and last.stop_token is not None:
            ids[-1] = [*ids[-1], last.stop_token]
        for i, kept in zip(group, ids):
            if kept:
                pieces.append(Piece(segments[i], 0, len(kept), segments[i].start + shift))
                tokens += kept
                end = max(end, segments[i].start + shift + len(kept))
    slots = sum(piece.length for piece in pieces)
    return pieces, max(end, slots) if options.profile == "official" else end, tokens


def _place(plan: Plan, options: MergeOptions, fork_point: int, limit: int) -> None:
    """Move the pieces from position 0 to where the layout puts them; sets `next_position`."""
    if not options.rerotate:  # every key stays where it is
        plan.pieces = [[replace(piece, start=piece.start - piece.delta) for piece in row] for row in plan.pieces]
        plan.next_position = max([fork_point, *(piece.start + piece.length for row in plan.pieces for piece in row)])
        return
    sequential = options.layout == "sequential"
    offsets = [sum(plan.spans[:j]) if sequential else 0 for j in range(len(plan.spans))]
    width = sum(plan.spans) if sequential else max(plan.spans, default=0)
    anchor = fork_point if options.anchor == "fork" else 0
    if options.anchor == "free":  # where most branches need no rotation
        wishes = Counter(-row[0].delta - offset for row, offset in zip(plan.pieces, offsets))
        anchor = min((wish for wish in wishes if 0 <= wish <= limit - width), key=lambda wish: (-wishes[wish], wish), default=0)
    plan.pieces = [[replace(piece, start=piece.start + anchor + offset) for piece in row] for row, offset in zip(plan.pieces, offsets)]
    plan.next_position = anchor + width


def apply_plan(
    plan: Plan,
    pool: KVPool,
    rope: Rope,
    consumed: Sequence[Branch],
    timings: dict,
    counters: dict,
    mapper: CacheMapper | None = None,
    kernels: MergeKernels | None = None,
) -> list[Segment]:
    """Carry out a plan; returns the context's segments, on pages of which the caller holds one count for each entry.

    consumed: branches that the caller closes afterwards; pages that only they hold are changed in place. On an error no page
    is kept; pages changed in place so far belong to the consumed branches.
    """
    kept = [*plan.prefix, *(piece.segment for row in plan.pieces for piece in row)]
    pool.require(0, "merging", kept)
    held = Counter(id(segment) for branch in consumed for segment in branch.segments)
    keys = _keys(plan)
    pieces = {key: piece for row, names in zip(plan.pieces, keys) for piece, key in zip(row, names)}
    twins = [keys.index(names) for names in keys]
    branch_of = {key: twins[index] for index, names in enumerate(keys) for key in names}
    transform = Transform(pool, rope, mapper, plan.spans, plan.branch_tokens, twins, kernels)
    variants = Counter(id(piece.segment) for piece in pieces.values())
    kept_prefix = set(map(id, plan.prefix))

    def in_place(piece: Piece) -> bool:
        alone = id(piece.segment) not in kept_prefix
        alone = alone and all(pool.ref_count[page] == held[id(piece.segment)] for page in piece.segment.pages)
        return piece.first == 0 and (not transform.changes(piece.delta) or alone and variants[id(piece.segment)] == 1)

    copied = {key for key, piece in pieces.items() if not in_place(piece)}
    pool.require(sum(pool.pages_for(pieces[key].length) for key in copied), "copying shared branch pages", kept)
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
