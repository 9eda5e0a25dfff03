"""Branches as files: workers can run in one process, on one machine, and be synthesized in another.

A folder holds `branches.json` and safetensors files: the shared prefix once, and each branch's own tokens in a file of its own.
Tensors `keys.L` and `values.L` [tokens, kv_heads, head_dim] of layer L, as they stand in the cache (keys rotated to `start`), with their
scales `keys.L.scale` [tokens, kv_heads, 1] from an 8-bit cache (whose channels are mixed, `kv_storage.Quantized`); all else (ids,
segments, state, fingerprint of the weights) is JSON in the file's header. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import MinipsError, brief
from .files import write_folder, write_json
from .kv_cache import Branch, KVPool, Segment, shared_prefix
from .kv_storage import FP8, LARGEST, Quantized, Store, dequantise, mix, read, read_parts, write, write_parts
from .reading import is_integer, read_json
from .rope import apply_rope
from .weights import open_safetensors

if TYPE_CHECKING:
    from .engine import Engine

FORMAT = "minips-branches"
VERSION = 1
INDEX = "branches.json"
_FILE_NAME = re.compile(r"[a-z0-9-]{1,64}\.safetensors")
_EIGHT_BITS = {"I8": torch.int8, "F8_E4M3": FP8}
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, **_EIGHT_BITS}
_ROLES, _ENDS, _TURNS = (
    ("context", "output"),
    (None, "stop", "length", "stop_string", "given"),
    ("open", "open_empty", "closed", "assistant"),
)
_REASONS = (None, "stop", "length", "given")


def save_branches(branches: Sequence[Branch], folder: str | Path, *, tokens: tuple[int, int] | None = None) -> Path:
    """Write branches of one engine, with their shared prefix, into a new folder; all of it or nothing.

    tokens: of a single branch, only its tokens [first, end); they come back as one output that stands where it stood, without a prefix
    of its own. Raises MinipsError where the folder exists, cannot be written, or a branch is closed.
    """
    folder = _folder(folder, "save_branches")
    first = branches[0] if isinstance(branches, (list, tuple)) and branches else branches
    if not isinstance(first, Branch):
        raise MinipsError(f"save_branches: {'no branches were' if first in ([], ()) else brief(first) + ' was'} given, expected branches")
    engine: Engine = first.owner
    branches = engine.check_branches(branches, "save_branches")
    for index, branch in enumerate(branches):
        end = branch.segments[-1].start + branch.segments[-1].length if branch.segments else branch.next_position
        if branch.reweight is not None or end != branch.next_position:
            raise MinipsError(f"save_branches: branch {index} is, or goes on from, a merged context; save the branches that were merged")
    prefix = shared_prefix(branches)
    ids = branches[0].token_ids[: sum(segment.length for segment in prefix)]
    head = {"fingerprint": engine.fingerprint, **_shape(engine.pool), "prefix_ids": ids}
    if tokens is not None:
        if not isinstance(tokens, (list, tuple)) or len(tokens) != 2:
            raise MinipsError(f"save_branches: tokens is {brief(tokens)}, expected two numbers (first, end)")
        own = [_cut(branches, *tokens)]
        head["prefix_ids"] = ids[: tokens[0]]  # a range that begins within the prefix stands behind that part of it
    else:
        own = [(branch.segments[len(prefix) :], _state(branch, len(ids))) for branch in branches]
    names = [f"branch-{index:03d}.safetensors" for index in range(len(own))]

    def fill(place: Path) -> None:
        if prefix and tokens is None:
            _write(place / "prefix.safetensors", engine.pool, prefix, {**head, "token_ids": ids})
        for name, (segments, state) in zip(names, own):
            _write(place / name, engine.pool, segments, {**head, **state})
        index = {"format": FORMAT, "version": VERSION, "prefix": "prefix.safetensors" if prefix and tokens is None else None}
        write_json(place / INDEX, {**index, "branches": names, **head, "rope": asdict(engine.config.rope)})

    return write_folder(folder, fill)


def load_branches(
    engine: Engine, folder: str | Path, *, prefix: Branch | None = None, start: int | None = None, force: bool = False
) -> list[Branch]:
    """Branches from files, as live ones: they share their prefix by identity, and nothing is computed.

    prefix: a live root with the same ids and weights, on which the branches then stand instead of the saved prefix. start: put the first
    token of each branch's own part at this position (keys are re-rotated once). force: take branches of other weights. Page size, KV dtype
    and device may be others than when they were saved. Raises MinipsError, before a page is taken, for whatever does not fit.
    """
    folder = _folder(folder, "load_branches")
    files = _read_index(folder)
    if start is not None and not (is_integer(start) and start >= 0):
        raise MinipsError(f"load_branches: start is {start!r}, expected a position")
    if prefix is not None:
        engine.check_branches([prefix], "load_branches")
    shared = _Content(folder / files[0], engine, force, whole=False) if files[0] is not None else None
    contents = [_Content(folder / name, engine, force) for name in files[1:]]
    for content in contents:
        content.check_prefix(shared, prefix)
        content.shift(start)
    loaded = contents if prefix is not None or shared is None else [shared, *contents]
    engine.pool.require(
        sum(content.pages(engine.pool) for content in loaded), f"loading {len(contents)} branches", prefix.segments if prefix else ()
    )
    root = prefix
    made: list[Branch] = []
    try:
        if root is None:
            root = engine.empty_branch()
            if shared is not None:
                shared.adopt_into(root, None)
        for content in contents:
            branch = root.child()
            made.append(branch)
            branch.fork_depth = len(root.segments)
            content.adopt_into(branch, start)
            content.restore(branch)
    except BaseException:
        for branch in made:
            branch.close()
        raise
    finally:
        if prefix is None and root is not None:
            root.close()
    return made


def _folder(folder: str | Path, call: str) -> Path:
    if not isinstance(folder, (str, Path)):
        raise MinipsError(f"{call}: folder is {brief(folder)}, expected a path")
    return Path(folder)


# Writing


def _shape(pool: KVPool) -> dict[str, int]:
    return {"layers": len(pool.keys), "kv_heads": pool.keys[0].shape[2], "head_dim": pool.keys[0].shape[3]}


def _stored(segment: Segment) -> int:
    """Cached tokens of a segment: a stop token may stand behind those that count."""
    return segment.length + (segment.stop_token is not None)


def _stored_entry(entry: dict) -> int:
    """The same of a segment as a file describes it."""
    return entry["length"] + (entry["stop_token"] is not None)


def _state(branch: Branch, shared: int) -> dict:
    """What a branch is, beside its K and V. `shared`: its leading tokens that stand in the prefix file."""
    return {
        "token_ids": branch.token_ids[shared:],
        "output_tokens": len(branch.output_ids),
        "text": branch.text,
        "finish_reason": branch.finish_reason,
        "turn": branch.turn,
        "raw": branch.raw,
    }


def _cut(branches: Sequence[Branch], first: int, end: int) -> tuple[list[tuple[Segment, int, int]], dict]:
    """Tokens [first, end) of one branch as pieces (segment, first, length) and the state of a branch that was given them."""
    if len(branches) != 1:
        raise MinipsError(f"save_branches: tokens is given with {len(branches)} branches, expected one")
    branch = branches[0]
    if not (is_integer(first) and is_integer(end) and 0 <= first < end <= branch.num_cached):
        raise MinipsError(f"save_branches: tokens is ({first!r}, {end!r}), expected 0 <= first < end <= {branch.num_cached}")
    pieces, at = [], 0
    for segment in branch.segments:
        low, high = max(first - at, 0), min(end - at, segment.length)
        if low < high:
            pieces.append((segment, low, high - low))
        at += segment.length
    ids = branch.token_ids[first:end]
    text = branch.owner.tokenizer.decode(ids) if branch.owner.tokenizer is not None else ""
    state = {"token_ids": ids, "output_tokens": len(ids), "text": text, "finish_reason": "given", "turn": "assistant", "raw": branch.raw}
    return pieces, state


def _write(path: Path, pool: KVPool, segments: Sequence[Segment | tuple[Segment, int, int]], data: dict) -> None:
    """One file: contiguous copies of just these tokens, and everything else in the header."""
    pool.require(0, "saving a branch", [item[0] if isinstance(item, tuple) else item for item in segments])
    slots, described = [], []
    for item in segments:
        segment, first, length = item if isinstance(item, tuple) else (item, 0, _stored(item))
        slots.append(pool.slots(segment.pages, first + length)[first:])
        whole = not isinstance(item, tuple)
        entry = {"length": segment.length if whole else length, "start": segment.start + first, "moves": segment.moves}
        entry |= {"role": segment.role, "ended": segment.ended, "stop_token": segment.stop_token} if whole else {}
        described.append({"role": "output", "ended": "given", "stop_token": None, **entry})
    index = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device=pool.device)
    tensors = {}
    for kind, layers in (("keys", pool.keys), ("values", pool.values)):
        for layer, store in enumerate(layers):
            codes, *scales = read_parts(store, index)
            tensors[f"{kind}.{layer}"] = codes.view(store.dtype).cpu().contiguous()
            tensors |= {f"{kind}.{layer}.scale": part.cpu().contiguous() for part in scales}
    save_file(tensors, path, metadata={"format": FORMAT, "version": str(VERSION), "data": json.dumps({**data, "segments": described})})


# Reading


def _read_index(folder: Path) -> list[str | None]:
    """The prefix file's name (or None) and the branch files' names, checked."""
    index = read_json(folder / INDEX)
    if (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        found = f"{brief(index.get('format'))}, version {brief(index.get('version'))}"
        raise MinipsError(f"{folder / INDEX}: format is {found}, expected {FORMAT!r}, version {VERSION}")
    names = index.get("branches")
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        raise MinipsError(f"{folder / INDEX}: branches is {brief(names)}, expected a list of different file names")
    prefix = index.get("prefix")
    for name in names if prefix is None else (prefix, *names):
        if not (isinstance(name, str) and _FILE_NAME.fullmatch(name)):
            raise MinipsError(f"{folder / INDEX}: {brief(name)} is no file name of this form: lower case, digits and -, .safetensors")
    return [prefix, *names]


class _Content:
    """One opened file whose header has been checked; tensors are read layer by layer, when pages are there."""

    def __init__(self, path: Path, engine: Engine, force: bool, whole: bool = True):
        """whole: a branch with its state, not only a prefix."""
        self.path, self.engine = path, engine
        try:
            self.file = open_safetensors(path)
            self.data: dict[str, Any] = json.loads((self.file.metadata() or {}).get("data", "null"))
        except FileNotFoundError:
            raise MinipsError(f"{path}: no such file, but {INDEX} names it") from None
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise MinipsError(f"{path}: is no readable safetensors file of saved branches ({brief(str(error))})") from None
        if not isinstance(self.data, dict):
            raise MinipsError(f"{path}: header has no field data, expected a file that save_branches wrote")
        self._check_data()
        if whole:
            self._check_state()
        self._check_tensors()
        if self.data["fingerprint"] != engine.fingerprint and not force:
            raise MinipsError(
                f"{path}: was made by weights with fingerprint {brief(self.data['fingerprint'])}, this engine's is {engine.fingerprint!r}; "
                "caches are only valid for the weights that made them (force=True takes them all the same)"
            )

    def fail(self, name: str, expected: str) -> MinipsError:
        return MinipsError(f"{self.path}: {name} is {brief(self.data.get(name))}, expected {expected}")

    def _check_data(self) -> None:
        data, limit = self.data, self.engine.config.max_position_embeddings
        vocab = self.engine.config.vocab_size
        for name in ("token_ids", "prefix_ids"):
            ids = data.get(name)
            if not isinstance(ids, list) or not all(is_integer(token) and 0 <= token < vocab for token in ids):
                raise self.fail(name, f"a list of token ids below {vocab}")
        segments = data.get("segments")
        if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
            raise self.fail("segments", "a list of objects")
        for entry in segments:
            numbers = (entry.get("length"), entry.get("start"), entry.get("moves"))
            fine = all(is_integer(number) and 0 <= number <= 2**31 for number in numbers)
            stop = entry.get("stop_token")
            fine = fine and {"ended", "stop_token"} <= entry.keys() and entry.get("role") in _ROLES and entry.get("ended") in _ENDS
            if not fine or not (stop is None or is_integer(stop) and 0 <= stop < vocab) or numbers[0] + numbers[1] > limit:
                raise MinipsError(f"{self.path}: segment {brief(entry)} is not valid, expected a run of tokens within {limit} positions")
        if sum(entry["length"] for entry in segments) != len(data["token_ids"]):
            raise self.fail("token_ids", f"{sum(entry['length'] for entry in segments)} ids, as many as the segments hold")
        if not isinstance(data.get("fingerprint"), str):
            raise self.fail("fingerprint", "a string")

    def _check_state(self) -> None:
        data, count = self.data, self.data.get("output_tokens")
        for name, fine, expected in (
            ("text", isinstance(data.get("text"), str), "a string"),
            ("output_tokens", is_integer(count) and 0 <= count <= len(data["token_ids"]), f"a count up to {len(data['token_ids'])}"),
            ("finish_reason", data.get("finish_reason") in _REASONS, f"one of {_REASONS}"),
            ("turn", data.get("turn") in _TURNS, f"one of {_TURNS}"),
            ("raw", isinstance(data.get("raw"), bool), "true or false"),
        ):
            if not fine or name not in data:
                raise self.fail(name, expected)

    def _check_tensors(self) -> None:
        pool = self.engine.pool
        shape = _shape(pool)
        for name, value in shape.items():
            if self.data.get(name) != value:
                raise self.fail(name, f"{value}, as the model has")
        wanted = [self.stored, shape["kv_heads"], shape["head_dim"]]
        names = {f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(shape["layers"])}
        found = {name: self.file.get_slice(name) for name in sorted(self.file.keys())}
        scales = {f"{name}.scale" for name in names & set(found) if found[name].get_dtype() in _EIGHT_BITS}
        if set(found) != names | scales:
            raise MinipsError(f"{self.path}: tensors {brief(sorted(set(found) ^ (names | scales)))} are missing or too many")
        for name, part in sorted(found.items()):
            size, kinds = (wanted, tuple(_DTYPES)) if name in names else ([*wanted[:2], 1], ("F32",))
            if part.get_shape() != size or part.get_dtype() not in kinds:
                raise MinipsError(f"{self.path}: {name} is {part.get_dtype()} {part.get_shape()}, expected {size} of {', '.join(kinds)}")

    @property
    def stored(self) -> int:
        return sum(map(_stored_entry, self.data["segments"]))

    def pages(self, pool: KVPool) -> int:
        return sum(pool.pages_for(_stored_entry(entry)) for entry in self.data["segments"])

    def check_prefix(self, shared: _Content | None, live: Branch | None) -> None:
        """The branch must have been made behind just this prefix."""
        if shared is not None and self.data["prefix_ids"] != shared.data["token_ids"]:
            raise MinipsError(f"{self.path}: was made behind another prefix than {shared.path.name} holds")
        if live is not None:
            if live.token_ids != self.data["prefix_ids"]:
                raise MinipsError(f"{self.path}: was made behind a prefix of other token ids than the given one has")
            if shared is not None and [(s.start, s.length) for s in live.segments] != [
                (entry["start"], entry["length"]) for entry in shared.data["segments"]
            ]:
                raise MinipsError(f"{self.path}: was made behind a prefix that stands at other positions than the given one")

    def shift(self, start: int | None) -> int:
        """Positions that `start` moves the branch's own part by; refused where one would be negative or beyond the model's limit."""
        entries = self.data["segments"]
        delta = 0 if start is None or not entries else start - entries[0]["start"]
        end = max((entry["start"] + delta + entry["length"] for entry in entries), default=0)
        self.engine.check_positions(end, 0, f"load_branches: {self.path.name}, whose start is {start}," if delta else "load_branches")
        if any(entry["start"] + delta < 0 for entry in entries):
            raise MinipsError(f"{self.path}: a segment would start before position 0 where the first one starts at {start}")
        return delta

    def adopt_into(self, branch: Branch, start: int | None) -> None:
        """Read K and V into fresh pages of `branch`; with `start`, moved so that the first token stands there."""
        pool, entries, delta = self.engine.pool, self.data["segments"], self.shift(start)
        slots, at = [], 0
        for entry in entries:
            stored = _stored_entry(entry)
            moves = entry["moves"] + (delta != 0)
            segment = Segment(
                pool.allocate(pool.pages_for(stored)), entry["length"], entry["start"] + delta, entry["role"], entry["ended"],
                entry["stop_token"], moves,
            )  # fmt: skip
            branch.adopt(segment, self.data["token_ids"][at : at + entry["length"]])
            slots.append(pool.slots(segment.pages, stored))
            at += entry["length"]
        if not slots:
            return
        index = torch.cat(slots)
        for layer, (keys, values) in enumerate(zip(pool.keys, pool.values)):
            self._put(f"keys.{layer}", keys, index, delta)
            self._put(f"values.{layer}", values, index, 0)

    def _put(self, name: str, store: Store, slots: Tensor, delta: int) -> None:
        """Store one tensor of the file; bit for bit where it has the cache's dtype and stays where it is."""
        device = self.engine.pool.device
        tensor = self.file.get_tensor(name).to(device)
        values, scales = tensor, None
        if tensor.dtype in LARGEST:
            scales = self.file.get_tensor(f"{name}.scale").to(device)
            if not bool((scales > 0).all()):
                raise MinipsError(f"{self.path}: {name}.scale holds values that are not positive numbers")
            values = mix(dequantise(tensor, scales, tensor.dtype))
        if isinstance(store, Quantized) and store.dtype == tensor.dtype and not delta:
            write_parts(store, slots, (tensor.view(store.codes.dtype), scales))
        else:
            write(store, slots, self._moved(values, delta))
        if not bool(torch.isfinite(read(store, slots, torch.float32)).all()):  # what this cache's dtype cannot hold is infinite there
            raise MinipsError(f"{self.path}: {name} holds values that are not finite numbers in a cache of {store.dtype}")

    def _moved(self, keys: Tensor, delta: int) -> Tensor:
        """Keys rotated by delta positions, in fp32; untouched where they stay."""
        if not delta:
            return keys
        cos, sin = self.engine.model.rope.tables(torch.tensor([delta], device=keys.device))
        return apply_rope(keys.float(), cos, sin)

    def restore(self, branch: Branch) -> None:
        data = self.data
        count = data["output_tokens"]
        branch.output_ids = branch.token_ids[len(branch.token_ids) - count :] if count else []
        branch.text, branch.finish_reason, branch.turn, branch.raw = data["text"], data["finish_reason"], data["turn"], data["raw"]
        branch.next_logits = None
