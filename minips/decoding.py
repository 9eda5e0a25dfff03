"""The two steps under every call: `feed` (ragged, chunked prefill) and `decode_rows` (one token a row and step).

Pages for the worst case are reserved before the first forward; a `Writer` hands them to its branch on `commit` and gives
them back on `abort`, so that a refused or broken call leaves the cache as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .attention import AttentionRow, GatherAttention
from .config import SamplingParams
from .errors import MinipsError, counted
from .kv_cache import Branch, KVPool, Segment
from .kv_storage import as_run
from .model import Model
from .sampling import RowSampler, sample, token_logprobs
from .tokenizer import StreamDecoder, Tokenizer
from .turns import memory_errors, safe_point

LOGITS_AT_ONCE = 64


class Writer:
    """Extends a branch by one segment with room for `capacity` tokens; `hide` leaves the branch's last tokens unseen."""

    def __init__(self, branch: Branch, capacity: int, role: str = "context", hide: int = 0):
        pool = branch.pool
        self.branch, self.pool = branch, pool
        past = [pool.host_slots(segment.pages, segment.length) for segment in branch.segments]
        self.past = sum(map(len, past)) - hide
        self.segment: Segment | None = Segment(pool.allocate(pool.pages_for(capacity)), 0, branch.next_position - hide, role)
        pool.writing.update(self.segment.pages)
        try:
            slots = torch.cat([*past, pool.host_slots(self.segment.pages, capacity)])
            if hide:
                slots = torch.cat((slots[: self.past], slots[self.past + hide :]))
            run = as_run(slots)
            self.first_slot = run.start if isinstance(run, slice) else None
            self.slots = slots.to(pool.device)
        except BaseException:  # out of memory, Ctrl-C
            self.abort()
            raise

    def row(self, count: int) -> AttentionRow:
        return AttentionRow(self.slots, self.length, count, self.first_slot, self.branch.reweight)

    @property
    def length(self) -> int:
        """Tokens that a new one attends to."""
        return self.past + self.segment.length

    def positions(self, count: int) -> range:
        first = self.segment.start + self.segment.length
        return range(first, first + count)

    def trim(self, length: int, stop_token: int | None = None) -> None:
        """Keep the first `length` tokens (and a cached stop token behind them), give the other pages back."""
        segment = self.segment
        segment.length, segment.stop_token = length, stop_token
        used = self.pool.pages_for(length + (stop_token is not None))
        spare, segment.pages = segment.pages[used:], segment.pages[:used]
        self.pool.writing.difference_update(spare)
        self.pool.release(spare)

    def commit(self, token_ids: list[int], stop_token: int | None = None) -> Segment:
        """Give the first `len(token_ids)` tokens (and a cached stop token behind them) to the branch, the other pages back."""
        self.trim(len(token_ids), stop_token)
        segment, self.segment = self.segment, None
        self.pool.writing.difference_update(segment.pages)
        self.branch.adopt(segment, token_ids)
        return segment

    def abort(self) -> None:
        """Give every page back; nothing after `commit`."""
        if self.segment is not None:
            segment, self.segment = self.segment, None
            self.pool.writing.difference_update(segment.pages)
            self.pool.release(segment.pages)


def open_writers(branches: Sequence[Branch], counts: Sequence[int], role: str, what: str, hide: int = 0) -> list[Writer]:
    """One writer a branch, all or none: refused before any page is taken where they do not fit together."""
    if not branches:
        return []
    pool: KVPool = branches[0].pool
    pool.require(sum(pool.pages_for(count) for count in counts), what, [segment for branch in branches for segment in branch.segments])
    writers: list[Writer] = []
    try:
        for branch, count in zip(branches, counts):
            writers.append(Writer(branch, count, role, hide))
    except BaseException:
        for writer in writers:
            writer.abort()
        raise
    return writers


def check_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Refuse stop strings where there is no tokenizer to make text of tokens."""
    if params.stop and tokenizer is None:
        raise MinipsError("SamplingParams: stop strings need a tokenizer, and this model folder has no tokenizer.json")


def _in_common(writers: Sequence[Writer]) -> int:
    """Tokens of the leading segments that are the same for all: their slots are the same too."""
    count = 0
    for segments in zip(*(writer.branch.segments for writer in writers)):
        if any(segment is not segments[0] for segment in segments):
            break
        count += segments[0].length
    return min(count, *(writer.past for writer in writers)) if len(writers) > 1 else 0


@torch.no_grad()
def _forward(model: Model, writers: Sequence[Writer], ids: Sequence[Sequence[int]], wanted: Sequence[int] | None = None) -> Tensor:
    """Run new tokens of several sequences through the model and into the cache -> hidden [total tokens, hidden_size].

    wanted: which of all the tokens are asked for (None: all); at least one is computed.
    """
    safe_point()
    pool = writers[0].pool
    attend = GatherAttention(pool.keys, pool.values, [writer.row(len(row)) for writer, row in zip(writers, ids)], _in_common(writers))
    positions = [position for writer, row in zip(writers, ids) for position in writer.positions(len(row))]
    tokens = [token for row in ids for token in row]
    cached = sum(writer.past + writer.segment.length for writer in writers)
    with memory_errors(
        f"computing {len(tokens)} tokens of {counted(len(writers), 'sequence')} behind {cached} cached ones on {pool.device}"
    ):
        chosen = torch.tensor(wanted or [0], device=pool.device) if wanted is not None and len(wanted) < len(tokens) else None
        hidden = model(torch.tensor(tokens, device=pool.device), torch.tensor(positions, device=pool.device), attend, chosen)
    for writer, row in zip(writers, ids):
        writer.segment.length += len(row)
    return hidden


def feed(
    model: Model, writers: Sequence[Writer], ids: Sequence[Sequence[int]], chunk: int, logits_from: Sequence[int] | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """Prefill every row, `chunk` tokens a forward pass, rows packed together.

    Yields (row, index, logits fp32 [n, vocab]) for the tokens from `logits_from[row]` on (default: only the last).
    """
    starts = [len(row) - 1 for row in ids] if logits_from is None else logits_from
    done = [0] * len(ids)
    while any(done[i] < len(row) for i, row in enumerate(ids)):
        batch, room = [], chunk  # (row, first, count)
        for i, row in enumerate(ids):
            count = min(len(row) - done[i], room)
            if count > 0:
                batch.append((i, done[i], count))
                room -= count
        wanted, parts, offset = [], [], 0
        for i, first, count in batch:
            done[i] = first + count
            if (start := max(starts[i], first)) < first + count:
                wanted += range(offset + start - first, offset + count)
                parts.append((i, start, first + count - start))
            offset += count
        hidden = _forward(model, [writers[i] for i, _, _ in batch], [ids[i][a : a + n] for i, a, n in batch], wanted)
        yield from _logits(model, hidden, parts)


@torch.no_grad()
def _logits(model: Model, hidden: Tensor, parts: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, Tensor]]:
    """hidden of parts (row, index, count), one behind the other -> (row, index, logits). Small ones at once: each product reads the whole head."""
    counts = [count for _, _, count in parts]
    together = model.logits(hidden).split(counts) if parts and sum(counts) <= LOGITS_AT_ONCE else None
    for at, ((row, index, _), states) in enumerate(zip(parts, hidden.split(counts) if parts else ())):
        yield row, index, model.logits(states) if together is None else together[at]


def prefill(model: Model, writers: Sequence[Writer], ids: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Feed and return the fp32 logits [vocab] of each row's last token."""
    last: list[Tensor] = [None] * len(ids)
    for row, _, logits in feed(model, writers, ids, chunk):
        last[row] = logits[-1]
    return last


class DecodeRow:
    """One sequence being decoded: parameters, random stream, text, and what came out so far."""

    def __init__(
        self,
        writer: Writer,
        params: SamplingParams,
        stream: int | None,
        limit: int,
        stop_ids: frozenset[int],
        valid_vocab: int,
        tokenizer: Tokenizer | None,
        label: int = 0,
        graphs: object | None = None,
    ):
        check_stops(params, tokenizer)
        self.writer, self.params, self.limit, self.stop_ids, self.label = writer, params, limit, stop_ids, label
        self.graphs = graphs  # the engine's `DecodeGraphs` or `CompiledSteps`, where it has them
        self.sampler = RowSampler(params, stream, writer.branch.token_ids, writer.branch.next_logits.shape[-1], valid_vocab)
        self.decoder = StreamDecoder(tokenizer, params.stop) if tokenizer is not None else None
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.ended: str | None = None  # stop, length or stop_string
        self.logprobs: list[dict[int, float]] | None = [] if params.logprobs else None
        self.logits: list[Tensor] | None = [] if params.return_logits else None
        self.last_logits: Tensor | None = writer.branch.next_logits
        self.stop_token: int | None = None  # cached behind the kept tokens

    @property
    def text(self) -> str:
        return self.decoder.text if self.decoder is not None else ""

    @property
    def needs_logits(self) -> bool:
        """Whether each token needs more than its own choice from the logits, or is chosen by what the tokens before it were."""
        return self.params.repetition_penalty != 1.0 or self.logprobs is not None or self.logits is not None

    def take(self, token: int, logits: Tensor | None) -> tuple[int | None, str]:
        """Account for one sampled token -> (token or None where it ended the row, new text). logits: its own, if `needs_logits`."""
        if self.logits is not None:
            self.logits.append(logits)
        if token in self.stop_ids:
            self.finish_reason = self.ended = "stop"
            return None, self.decoder.flush() if self.decoder is not None else ""
        self.ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(token_logprobs(logits, token, self.params.logprobs))
        piece = self.decoder.push(token) if self.decoder is not None else ""
        if self.decoder is not None and self.decoder.stopped:
            self._cut_at_stop_string()
            return None, piece
        if len(self.ids) == self.limit:
            self.finish_reason = self.ended = "length"
            piece += self.decoder.flush() if self.decoder is not None else ""
            if self.decoder is not None and self.decoder.stopped:
                self._cut_at_stop_string()
        return token, piece

    def _cut_at_stop_string(self) -> None:
        self.finish_reason, self.ended = "stop", "stop_string"
        del self.ids[self.decoder.kept_tokens :]
        self.last_logits = None  # of a token that is no longer the last
        if self.logprobs is not None:
            del self.logprobs[len(self.ids) :]
        if self.logits is not None:
            del self.logits[len(self.ids) + 1 :]


def decode_rows(model: Model, rows: Sequence[DecodeRow], drain: bool) -> Iterator[tuple[int, int | None, str]]:
    """Decode until every row has ended; yields (row index, token or None, new text) as tokens come.

    Finished rows leave the batch. With `drain` each first has its last token cached (a stop token as a spare one), so that
    the branch can go on; without, the last token's K/V is not computed.
    """
    for row in rows:
        if row.limit == 0:
            row.finish_reason = row.ended = "length"
    active = [index for index, row in enumerate(rows) if row.finish_reason is None]
    if not active:
        return
    logits = torch.stack([rows[index].last_logits for index in active])
    graphs = rows[0].graphs
    ahead = graphs is not None and graphs.ahead and not any(row.needs_logits for row in rows)
    while active:
        if ahead and graphs.ready(model, *_sizes([rows[index].writer for index in active])):  # else these tokens do not wait for a capture
            yield from _decode_ahead(model, rows, active, logits, drain)
            return
        tokens = sample(logits, [rows[index].sampler for index in active], [rows[index].label for index in active])
        feeding: list[tuple[int, int]] = []
        for at, (index, token) in enumerate(zip(active, tokens)):
            row = rows[index]
            kept, piece = row.take(token, logits[at])
            yield index, kept, piece
            wanted = row.finish_reason is None or (drain or row.logits is not None) and row.ended != "stop_string"
            if row.ended == "stop":
                row.last_logits = logits[at].clone()
                wanted = drain and len(row.ids) < row.limit
            if wanted:
                feeding.append((index, token))
        if not feeding:
            break
        logits = _next_logits(model, [rows[index] for index, _ in feeding], [token for _, token in feeding])
        keep = []
        for at, (index, token) in enumerate(feeding):
            row = rows[index]
            if row.finish_reason is None:
                keep.append(at)
            elif row.ended == "stop":
                row.stop_token = token
            else:
                row.last_logits = logits[at].clone()
                if row.logits is not None:
                    row.logits.append(row.last_logits)
        active, logits = [feeding[at][0] for at in keep], logits[keep]


def _decode_ahead(
    model: Model, rows: Sequence[DecodeRow], active: list[int], logits: Tensor, drain: bool
) -> Iterator[tuple[int, int | None, str]]:
    """As `decode_rows`, a step ahead: tokens are chosen on the device, and the step that they go into starts before the host reads them.

    So a row that its text or a stop token ends has been fed once more by the time that is known: into a page that was reserved
    for it, and as `drain` asks. A row that `limit` ends is known beforehand. logits: fp32 [n, vocab] of the `active` rows.
    """
    graphs = rows[0].graphs
    chosen = graphs.choose(logits, [rows[index].sampler for index in active])
    places = list(range(len(active)))  # of the active rows in `chosen` and `logits`
    while active:
        feeding = [at for at, index in enumerate(active) if drain or len(rows[index].ids) + 1 < rows[index].limit]
        fed = [rows[active[at]] for at in feeding]
        if feeding:
            new_logits = _next_logits(model, fed, graphs.select(chosen.tokens, [places[at] for at in feeding]))
            upcoming = graphs.choose(new_logits, [row.sampler for row in fed])
        found, peaks = chosen.wait()
        if not all(math.isfinite(peaks[place]) for place in places):
            sample(logits[places], [rows[index].sampler for index in active], [rows[index].label for index in active])  # says which one
        for at, (index, place) in enumerate(zip(active, places)):
            row, token = rows[index], found[place]
            row.sampler.record(token)
            kept, piece = row.take(token, None)
            yield index, kept, piece
            if row.ended == "stop":
                row.last_logits, row.stop_token = logits[place].clone(), token if drain else None
            elif row.ended == "length" and drain:
                row.last_logits = new_logits[feeding.index(at)].clone()
        places = [place for place, row in enumerate(fed) if row.finish_reason is None]
        active = [active[feeding[place]] for place in places]
        if active:
            chosen, logits = upcoming, new_logits


def _next_logits(model: Model, rows: Sequence[DecodeRow], tokens: Sequence[int] | Tensor) -> Tensor:
    """Feed one token a row, by a captured graph where one covers the step -> fp32 logits [n, vocab]."""
    writers, graphs = [row.writer for row in rows], rows[0].graphs
    if graphs is not None:
        safe_point()
        device = writers[0].pool.device
        lengths, plain = _sizes(writers)
        with memory_errors(f"decoding {counted(len(writers), 'sequence')} of up to {max(lengths)} tokens on {device}"):
            ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, device=device)
            positions = [writer.positions(1)[0] for writer in writers]
            slots = [writer.slots for writer in writers]
            logits = graphs.step(model, ids, positions, lengths, slots, plain)
        if logits is not None:
            for writer in writers:
                writer.segment.length += 1
            return logits
    hidden = _forward(model, writers, [[token] for token in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)])
    with torch.no_grad():
        return model.logits(hidden)


def _sizes(writers: Sequence[Writer]) -> tuple[list[int], bool]:
    """What the next step attends to in each row, its own token counted, and whether all of that is weighed alike."""
    return [writer.length + 1 for writer in writers], all(writer.branch.reweight is None for writer in writers)
