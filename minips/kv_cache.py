"""The paged KV cache: a pool of pages with reference counts, segments on pages of their own, and branch handles.

Invariant (`KVPool.check`): every page but the null page is either free or referenced, and each count equals the number of
open branches whose segments stand on that page.
"""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Reweight
from .config import EngineConfig
from .errors import MinipsError, RoomError
from .kv_storage import new_store, parts, read_parts, write_parts
from .turns import HeldSignals


@dataclass(eq=False)
class Segment:
    """A run of tokens on pages of its own, with one RoPE origin. Segments are shared by identity.

    `length` tokens stand in `pages`; `start` is the position of the first. `role`: context (given) or output (a worker's z).
    `ended`: how an output ended: stop, length, stop_string or given. `stop_token`: its id if it is cached right behind
    `length`. `moves` counts the rotations that its stored keys have been through. `host`: its whole pages, part by part, while it
    is parked (it has no `pages` then); `used`: when a call last needed it.
    """

    pages: list[int]
    length: int
    start: int
    role: str = "context"
    ended: str | None = None
    stop_token: int | None = None
    moves: int = 0
    host: list[Tensor] | None = None
    used: int = 0


class KVPool:
    """Per layer one K and one V store [num_pages, page_size, kv_heads, head_dim] (see `kv_storage`). Page 0 is the null page.

    offload: segments that no running call needs may be parked in host memory; `require` brings back those that a call names.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        offload: bool = False,
    ):
        shape = (num_pages, page_size, kv_heads, head_dim)
        self.keys, self.values = ([new_store(shape, dtype, device, mixed=True) for _ in range(num_layers)] for _ in range(2))
        self.page_size, self.num_pages, self.device = page_size, num_pages, torch.device(device)
        self.ref_count = [0] * num_pages
        self._free = [(1, num_pages - 1)] if num_pages > 1 else []  # sorted runs (first page, count)
        self.branches: weakref.WeakSet[Branch] = weakref.WeakSet()
        self.writing: set[int] = set()  # pages of segments that are being written and have no branch yet
        self.offload, self._calls = offload, 0

    @property
    def num_free(self) -> int:
        return sum(count for _, count in self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def require(self, pages: int, what: str, keep: Iterable[Segment] = ()) -> None:
        """Have the segments of `keep` in pages and `pages` more free, or refuse; idle segments are parked where that helps."""
        self.make_room(pages, what, keep)
        self._refuse(pages, what)

    def _refuse(self, pages: int, what: str) -> None:
        if pages > self.num_free:
            size, total = self.page_size, self.num_pages - 1
            raise RoomError(
                f"KV cache: {what} needs {pages} pages of {size} tokens, {self.num_free} of {total} are free; "
                f"close branches, lower max_tokens or raise {'max_device_kv_bytes' if self.offload else 'max_kv_tokens'}"
            )

    def make_room(self, pages: int, what: str, keep: Iterable[Segment] = ()) -> None:
        """Bring `keep` back from the host, and park idle segments, the longest unused first, as far as `pages` are not free.

        Raises RoomError, before anything moves, where `keep` itself does not fit. Without `offload` nothing is ever parked.
        """
        if not self.offload:
            return
        self._calls += 1
        wanted = {id(segment): segment for segment in keep}
        for segment in wanted.values():
            segment.used = self._calls
        holders = self._holders()
        idle = [s for s, held in holders.values() if id(s) not in wanted and self._is_idle(s, held)]
        parked = [segment for segment in wanted.values() if segment.host is not None]
        back = sum(len(segment.host[0]) for segment in parked)
        spare = self.num_free + sum(len(segment.pages) for segment in idle)
        if back > spare:
            raise RoomError(
                f"KV cache: {what} needs {back} pages of {self.page_size} tokens for what is parked in host memory, {spare} of "
                f"{self.num_pages - 1} can be made free; merge fewer or shorter branches or raise max_device_kv_bytes"
            )
        for segment in sorted(idle, key=lambda segment: segment.used):
            if self.num_free >= back + pages:
                break
            self._park(segment, len(holders[id(segment)][1]))
        for segment in parked:
            self._bring_back(segment, len(holders[id(segment)][1]))

    def _holders(self) -> dict[int, tuple[Segment, list[Branch]]]:
        """Each segment and the open branches that hold it, one entry for each time."""
        found: dict[int, tuple[Segment, list[Branch]]] = {}
        for branch in list(self.branches):
            for segment in branch.segments:
                found.setdefault(id(segment), (segment, []))[1].append(branch)
        return found

    def _is_idle(self, segment: Segment, held: list[Branch]) -> bool:
        """Whether parking it frees its pages: nobody computes with it, and no other segment stands on them."""
        alone = all(self.ref_count[page] == len(held) for page in segment.pages)
        return bool(segment.pages) and alone and not any(branch.busy for branch in held)

    def _parts(self) -> list[Tensor]:
        return [part for store in (*self.keys, *self.values) for part in parts(store)]

    def _park(self, segment: Segment, held: int) -> None:
        index = torch.tensor(segment.pages, device=self.device)
        pinned = self.device.type == "cuda"
        host = []
        for part in self._parts():
            kept = torch.empty((len(index), *part.shape[1:]), dtype=part.dtype, pin_memory=pinned)
            host.append(kept.copy_(part.index_select(0, index)))
        pages, segment.pages, segment.host = segment.pages, [], host
        for _ in range(held):
            self.release(pages)

    def _bring_back(self, segment: Segment, held: int) -> None:
        """From pinned memory layer by layer without waiting: what reads the pages comes later in the same stream."""
        pages = self.allocate(len(segment.host[0]))
        try:
            index = torch.tensor(pages, device=self.device)
            for part, kept in zip(self._parts(), segment.host):
                part.index_copy_(0, index, kept.to(self.device, non_blocking=True))
        except BaseException:  # out of memory
            self.release(pages)
            raise
        segment.pages, segment.host = pages, None
        for _ in range(held - 1):
            self.retain(pages)

    @property
    def parked_pages(self) -> int:
        """Pages that open branches would need for what they have in host memory."""
        return sum(len(segment.host[0]) for segment, _ in self._holders().values() if segment.host is not None)

    def allocate(self, pages: int) -> list[int]:
        """Take pages with count 1, as one contiguous run where one is free (smallest that fits), else the largest runs."""
        self._refuse(pages, "this allocation")
        taken: list[int] = []
        while len(taken) < pages:
            missing = pages - len(taken)
            fitting = [run for run in self._free if run[1] >= missing]
            first, count = min(fitting, key=lambda run: run[1]) if fitting else max(self._free, key=lambda run: run[1])
            self._free.remove((first, count))
            used = min(count, missing)
            if used < count:
                self._insert(first + used, count - used)
            taken.extend(range(first, first + used))
        for page in taken:
            self.ref_count[page] = 1
        return taken

    def retain(self, pages: list[int]) -> None:
        for page in pages:
            assert self.ref_count[page] > 0, f"page {page} is free"
            self.ref_count[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self.ref_count[page] > 0, f"page {page} is free already"
            self.ref_count[page] -= 1
            if self.ref_count[page] == 0:
                self._insert(page, 1)

    def drop(self, branch: Branch) -> None:
        """Take all its segments from a branch and give their pages back; refused while it is being decoded."""
        if branch.busy:
            raise MinipsError("a branch cannot be closed while it is being decoded; raise an exception in the callback to stop")
        while branch.segments:
            KVPool.release(self, branch.segments.pop().pages)  # a step of this change, none of its own (`Turns.guard`)
        branch.closed = True

    def _insert(self, first: int, count: int) -> None:
        at = bisect_left(self._free, (first, 0))
        if at < len(self._free) and self._free[at][0] == first + count:
            count += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == first:
            first, count = self._free[at - 1][0], count + self._free.pop(at - 1)[1]
            at -= 1
        self._free.insert(at, (first, count))

    def slots(self, pages: list[int], length: int) -> Tensor:
        """Flat slots int64 [length] of the tokens that stand in `pages`, in order, on the pool's device."""
        return self.host_slots(pages, length).to(self.device)

    def host_slots(self, pages: list[int], length: int) -> Tensor:
        """`slots`, on the CPU."""
        assert length <= len(pages) * self.page_size, "these tokens are parked in host memory"
        table = torch.tensor(pages, dtype=torch.int64, device="cpu")
        offsets = torch.arange(self.page_size, device="cpu")
        return (table[:, None] * self.page_size + offsets).flatten()[:length]

    def settle(self) -> None:
        """Wait for the device: what is timed then is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy(self, segment: Segment, first: int, length: int) -> Segment:
        """A segment of its own (count 1) holding `length` cached tokens of `segment` from token `first` on."""
        pages = self.allocate(self.pages_for(length))
        try:
            source, target = self.slots(segment.pages, first + length)[first:], self.slots(pages, length)
            for store in (*self.keys, *self.values):
                write_parts(store, target, read_parts(store, source))
        except BaseException:  # out of memory, Ctrl-C
            self.release(pages)
            raise
        return Segment(pages, length, segment.start + first, segment.role, segment.ended, moves=segment.moves)

    def check(self) -> bool:
        """Recount everything; raises AssertionError where a page is lost, doubly held or freed under a branch."""
        free = [page for first, count in self._free for page in range(first, first + count)]
        referenced = [page for page in range(1, self.num_pages) if self.ref_count[page] > 0]
        assert not set(free) & set(referenced), "a page is free and referenced"
        assert len(set(free)) == len(free) and len(free) + len(referenced) == self.num_pages - 1, "a page is lost or free twice"
        held = Counter(page for branch in self.branches for segment in branch.segments for page in segment.pages)
        held.update(self.writing)
        parked = [segment for segment, _ in self._holders().values() if segment.host is not None]
        assert not any(segment.pages for segment in parked), "a parked segment has pages"
        assert held == Counter({page: self.ref_count[page] for page in referenced}), "counts differ from the branches' pages"
        return True


class Branch:
    """A handle on one sequence: its segments, its token ids and what it decoded. A context manager; `close` returns its pages.

    token_ids: all ids, cached in order. output_ids: z, the last decoded span. text: z as text. finish_reason: stop, length,
    given (`Engine.encode`) or None before decoding. logprobs and logits: those of z, if its params asked for them.
    fork_depth: how many leading segments it inherited from the branch it was forked from.
    """

    def __init__(self, pool: KVPool, owner: object, segments: list[Segment], token_ids: list[int], next_position: int):
        self.pool, self.owner = pool, owner
        self.segments: list[Segment] = []
        self.token_ids, self.next_position = list(token_ids), next_position
        self.closed = self.busy = False  # busy: being decoded
        pool.branches.add(self)
        for segment in segments:
            pool.retain(segment.pages)
            self.segments.append(segment)
        self.fork_depth = len(self.segments)
        self.output_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[dict[int, float]] | None = None
        self.logits: Tensor | None = None
        self.next_logits: Tensor | None = None  # fp32 [vocab] of the last cached token; None: computed when needed
        self.raw = False  # string prompts are plain text, as the root's was
        self.turn = "closed"  # of the chat, at the end: open (a user turn), open_empty, closed, or assistant
        self.reweight: Reweight | None = None  # of a merged context

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_cached(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights that made the K/V."""
        return self.owner.fingerprint

    def adopt(self, segment: Segment, token_ids: list[int]) -> None:
        """Append a segment whose pages the caller already holds for this branch."""
        self.segments.append(segment)
        self.token_ids.extend(token_ids)
        self.next_position = segment.start + segment.length

    def child(self) -> Branch:
        """A new handle on the same pages (counts + 1, no copy)."""
        branch = Branch(self.pool, self.owner, self.segments, self.token_ids, self.next_position)
        branch.raw, branch.turn, branch.next_logits, branch.reweight = self.raw, self.turn, self.next_logits, self.reweight
        return branch

    def close(self) -> None:
        """Return the pages; a second close does nothing. Refused while the branch is being decoded."""
        with nullcontext() if sys.is_finalizing() else HeldSignals():
            self.pool.drop(self)
            self.closed, self.next_logits = True, None

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "closed", True) is False:
            self.busy = False
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.num_cached} cached"
        return f"Branch({self.num_tokens} tokens, {state}, {len(self.output_ids)} decoded, finish_reason={self.finish_reason!r})"


def shared_prefix(branches: Sequence[Branch]) -> list[Segment]:
    """c_sh: the leading segments that all branches share by identity, as far as each inherited them by its fork."""
    run: list[Segment] = []
    for index in range(min((branch.fork_depth for branch in branches), default=0)):
        segment = branches[0].segments[index]
        if any(branch.segments[index] is not segment for branch in branches):
            break
        run.append(segment)
    return run


def pool_pages(settings: EngineConfig, max_positions: int, bytes_per_token: int, device: torch.device) -> int:
    """Pages of a pool, the null page counted: what `max_kv_tokens` need, what `max_device_kv_bytes` hold, or by the free memory."""
    if settings.max_device_kv_bytes is not None:
        pages = settings.max_device_kv_bytes // (bytes_per_token * settings.page_size)
        if pages < 2:
            least = 2 * bytes_per_token * settings.page_size
            raise MinipsError(f"max_device_kv_bytes is {settings.max_device_kv_bytes}, expected at least {least} (two pages)")
        return pages
    tokens = settings.max_kv_tokens or default_kv_tokens(max_positions, bytes_per_token, device)
    return -(-tokens // settings.page_size) + 1


def default_kv_tokens(max_positions: int, bytes_per_token: int, device: torch.device) -> int:
    """A third of the free memory, at most sixteen full contexts (of 8192 tokens at most). Memory is touched only when used."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        names = [name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names]
        free = os.sysconf(names[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(256, min(16 * min(max_positions, 8192), free // 3 // bytes_per_token))
