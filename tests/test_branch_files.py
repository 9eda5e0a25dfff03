"""Branches saved and loaded: the same tokens and logits bit for bit, small files, and nothing from strangers. FAULTS items 83 to 88."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minips import MinipsError, SamplingParams, Synthesizer
from minips.branch_files import load_branches, save_branches
from minips.config import EngineConfig
from minips.engine import Engine
from minips.rope import apply_rope

from .support import OUTS, OWNS, PREFIX, U, branches_of, prompt_ids, relative_error, tiny_config, tiny_engine, u_logits

GREEDY = SamplingParams(max_tokens=8, return_logits=True)


def state(branch):
    segments = [(s.length, s.start, s.role, s.ended, s.stop_token, s.moves) for s in branch.segments]
    told = (branch.token_ids, branch.output_ids, branch.text, branch.finish_reason, branch.next_position, branch.fork_depth)
    return segments, told, branch.turn, branch.raw


def cached(branch):
    pool = branch.pool
    slots = torch.cat([pool.slots(s.pages, s.length) for s in branch.segments])
    return [tensor.flatten(0, 1)[slots].float() for tensor in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_equals_the_live_run_bit_for_bit(tmp_path, dtype):
    live, other = tiny_engine(dtype=dtype), tiny_engine(dtype=dtype, poison=3.0)
    object.__setattr__(other, "_fingerprint", live.fingerprint)
    branches = branches_of(live)
    save_branches(branches, tmp_path / "saved")
    loaded = load_branches(other, tmp_path / "saved")
    assert [state(b) for b in loaded] == [state(b) for b in branches] and other.check()
    assert all(branch.segments[0] is loaded[0].segments[0] for branch in loaded), "one prefix"
    assert other.stats()["prefilled_tokens"] == 0 and other.stats()["used_pages"] == live.stats()["used_pages"]
    found, expected = (Synthesizer(e).generate_from_caches(b, U, GREEDY) for e, b in ((other, loaded), (live, branches)))
    assert found.token_ids == expected.token_ids and torch.equal(found.logits, expected.logits)
    assert other.stats()["used_pages"] == 0 and other.check()


def test_decoded_branches_go_on_as_they_would_have(tmp_path):  # FAULTS 84, 85
    live, other = tiny_engine(), tiny_engine()
    object.__setattr__(other, "_fingerprint", live.fingerprint)
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=4)
    root = live.prefill(PREFIX)
    branches = live.decode(live.fork(root, OWNS), params)
    save_branches(branches, tmp_path / "saved")
    loaded = load_branches(other, tmp_path / "saved")
    again = SamplingParams(max_tokens=9, temperature=0.8, seed=7)
    for engine, rows in ((live, branches), (other, loaded)):
        engine.decode(engine.extend(rows, [[5, 6]] * 3), again)
    assert [b.token_ids for b in loaded] == [b.token_ids for b in branches]
    assert other.stats()["prefilled_tokens"] == 6, "only the new turns"
    save_branches([root], tmp_path / "root")
    alone = load_branches(other, tmp_path / "root")[0]
    assert other.decode([alone], GREEDY)[0].output_ids == live.decode([root], GREEDY)[0].output_ids


def test_stop_tokens_come_along(tmp_path):
    live = tiny_engine()
    branch = live.decode([live.prefill(PREFIX)], SamplingParams(max_tokens=5))[0]
    stop = branch.output_ids[2]
    branch = live.decode([live.prefill(PREFIX)], SamplingParams(max_tokens=5, stop_token_ids=(stop,)))[0]
    assert branch.segments[-1].stop_token == stop
    save_branches([branch], tmp_path / "saved")
    loaded = load_branches(live, tmp_path / "saved")[0]
    assert state(loaded) == state(branch)
    one, two = (u_logits(live, [b], keep_stop_token=True) for b in (branch, loaded))
    assert torch.equal(one, two)


def test_files_hold_just_their_branch(tmp_path):  # FAULTS 86
    engine = tiny_engine(max_kv_tokens=8000)
    save_branches(branches_of(engine), tmp_path / "saved")
    per_token = engine.kv_bytes_per_token
    for name, tokens in (("prefix", len(PREFIX)), *((f"branch-{i:03d}", len(OWNS[i]) + len(OUTS[i])) for i in range(3))):
        path = tmp_path / "saved" / f"{name}.safetensors"
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == 8 + header + tokens * per_token
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"], "nothing half-written lies about"


@pytest.mark.parametrize("page_size, dtype", [(1, torch.float32), (7, torch.float32), (16, torch.bfloat16)])
def test_other_page_sizes_and_dtypes(tmp_path, page_size, dtype):
    live = tiny_engine()
    branches = branches_of(live)
    save_branches(branches, tmp_path / "saved")
    other = tiny_engine(page_size=page_size, dtype=dtype)
    loaded = load_branches(other, tmp_path / "saved", force=True)
    for one, two in zip(branches, loaded):
        for kept, read in zip(cached(one), cached(two)):
            assert torch.equal(kept.to(dtype).float(), read)
    assert relative_error(u_logits(other, loaded), u_logits(live, branches)) < (1e-5 if dtype == torch.float32 else 0.1)


def test_a_range_of_tokens_at_another_place(tmp_path):  # FAULTS 87
    engine = tiny_engine(tiny_config(max_position_embeddings=1024))
    branch = engine.encode([engine.prefill(prompt_ids(4))], [prompt_ids(40, 3)])[0]
    save_branches([branch], tmp_path / "part", tokens=(5, 21))
    part = load_branches(engine, tmp_path / "part", start=300)[0]
    assert part.token_ids == branch.token_ids[5:21] == part.output_ids and part.segments[0].start == 300
    before, after = cached(branch), cached(part)
    cos, sin = engine.model.rope.tables(torch.tensor([295]))
    layers = len(engine.pool.keys)
    for layer in range(layers):
        assert torch.allclose(after[layer], apply_rope(before[layer][5:21], cos, sin), atol=1e-6)
        assert torch.equal(after[layers + layer], before[layers + layer][5:21])
    stays = load_branches(engine, tmp_path / "part")[0]
    found, expected = (u_logits(engine, [b], keep_prefix=False, anchor="zero") for b in (part, stays))
    assert relative_error(found, expected) < 1e-4
    for bad in ((0, 0), (5, 45), (-1, 3), (3, "x")):
        with pytest.raises(MinipsError, match="tokens is"):
            save_branches([branch], tmp_path / "bad", tokens=bad)
    for start in (1020, -1, "x"):
        with pytest.raises(MinipsError, match="start is (1020, needs 1036 positions|-1|'x')"):
            load_branches(engine, tmp_path / "part", start=start)
    assert not (tmp_path / "bad").exists() and engine.check()


def test_a_live_prefix_takes_the_saved_ones_place(tmp_path):
    engine = tiny_engine()
    branches = branches_of(engine)
    save_branches(branches, tmp_path / "saved")
    root = engine.prefill(PREFIX)
    loaded = load_branches(engine, tmp_path / "saved", prefix=root)
    assert all(branch.segments[0] is root.segments[0] for branch in loaded)
    assert torch.equal(u_logits(engine, loaded), u_logits(engine, branches))
    with engine.prefill(prompt_ids(10, 77)) as other, pytest.raises(MinipsError, match="prefix of other token ids"):
        load_branches(engine, tmp_path / "saved", prefix=other)


def test_a_range_that_begins_within_the_prefix_is_joined_to_that_part_of_it(tmp_path):
    engine = tiny_engine()
    branch = branches_of(engine)[0]
    save_branches([branch], tmp_path / "part", tokens=(4, 20))
    with engine.prefill(PREFIX) as whole, pytest.raises(MinipsError, match="prefix of other token ids"):
        load_branches(engine, tmp_path / "part", prefix=whole)  # its tokens 4 to 9 would stand there twice
    with engine.prefill(PREFIX[:4]) as start:
        (joined,) = load_branches(engine, tmp_path / "part", prefix=start)
    assert joined.token_ids == branch.token_ids[:20] and joined.next_position == 20
    for found, expected in zip(cached(joined), cached(branch)):
        assert torch.allclose(found, expected[:20], atol=1e-5)


def rewritten(folder, change, name="branch-001.safetensors"):
    """Write a file anew with its tensors and header data changed."""
    path = folder / name
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    data = json.loads(meta["data"])
    result = change(tensors, data)
    tensors, data = result if isinstance(result, tuple) else (tensors, data)
    save_file(tensors, path, metadata={**meta, "data": json.dumps(data)})


def field(**changes):
    return lambda tensors, data: (tensors, {**data, **changes})


CHANGES = {
    "another fingerprint": (field(fingerprint="0" * 32), "only valid for the weights"),
    "another head size": (field(head_dim=8), "head_dim is 8, expected 16"),
    "another prefix": (field(prefix_ids=[1, 2]), "another prefix"),
    "ids out of range": (field(token_ids=[1000] * 14), "token ids below 97"),
    "too few ids": (field(token_ids=[1]), "as many as the segments hold"),
    "no segments": (field(segments=None), "segments is None"),
    "a negative length": (field(segments=[{"length": -1, "start": 0, "moves": 0, "role": "output", "ended": None}]), "is not valid"),
    "beyond the limit": (
        field(segments=[{"length": 14, "start": 250, "moves": 0, "role": "output", "ended": None}]),
        "within 256 positions",
    ),
    "no text": (field(text=7), "text is 7"),
    "too many outputs": (field(output_tokens=10**9), "output_tokens"),
    "an unknown turn": (field(turn="over"), "turn is 'over'"),
    "a tensor less": (lambda t, d: t.pop("keys.1") is None, "keys.1"),
    "a wrong shape": (lambda t, d: t.update({"keys.0": t["keys.0"][:3].clone()}), "keys.0 is F32 .3, 2, 16."),
    "a wrong dtype": (lambda t, d: t.update({"keys.0": t["keys.0"].long()}), "keys.0 is I64"),
    "not a number": (lambda t, d: t["values.1"].fill_(float("nan")) is None, "not finite"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_do_not_fit_are_refused_and_leave_no_page(tmp_path, name):  # FAULTS 80, 84
    change, message = CHANGES[name]
    engine = tiny_engine()
    save_branches(branches_of(engine), tmp_path / "saved")
    rewritten(tmp_path / "saved", change)
    engine.close()
    with pytest.raises(MinipsError, match=message) as caught:
        load_branches(engine, tmp_path / "saved")
    assert "branch-001" in str(caught.value) or "prefix" in message
    assert engine.stats()["used_pages"] == 0 and engine.stats()["open_branches"] == 0 and engine.check()


@pytest.mark.parametrize(
    "index, message",
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 99}, "version 99"),
        ({"branches": []}, "list of different file names"),
        ({"branches": ["branch-000.safetensors"] * 2}, "different file names"),
        ({"branches": ["../branch-000.safetensors"]}, "is no file name"),
        ({"branches": ["/etc/passwd"]}, "is no file name"),
        ({"branches": [7]}, "is no file name"),
        ({"prefix": "../prefix.safetensors"}, "is no file name"),
        ({"branches": ["branch-009.safetensors"]}, "no such file"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, index, message):
    engine = tiny_engine()
    save_branches(branches_of(engine), tmp_path / "saved")
    path = tmp_path / "saved" / "branches.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **index}))
    with pytest.raises(MinipsError, match=message):
        load_branches(engine, tmp_path / "saved")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Bomb()), b"PK\x03\x04" + b"\0" * 60, b"", b"\xff" * 40, (10**12).to_bytes(8, "little") + b"{}"]
)
def test_pickles_and_rubbish_are_refused(tmp_path, monkeypatch, content):  # FAULTS 83
    monkeypatch.chdir(tmp_path)
    engine = tiny_engine()
    save_branches(branches_of(engine), tmp_path / "saved")
    (tmp_path / "saved" / "branch-001.safetensors").write_bytes(content)
    with pytest.raises(MinipsError, match="branch-001.safetensors: is no readable safetensors file"):
        load_branches(engine, tmp_path / "saved")
    assert not (tmp_path / "exploded").exists()


def test_what_cannot_be_saved_or_loaded_says_so(tmp_path):
    engine = tiny_engine()
    branches = branches_of(engine)
    save_branches(branches, tmp_path / "saved")
    with pytest.raises(MinipsError, match="exists already"):
        save_branches(branches, tmp_path / "saved")
    with pytest.raises(MinipsError, match="no branches"):
        save_branches([], tmp_path / "none")
    with pytest.raises(MinipsError, match="with 3 branches, expected one"):
        save_branches(branches, tmp_path / "none", tokens=(0, 2))
    with pytest.raises(MinipsError, match="no such file"):
        load_branches(engine, tmp_path / "nowhere")
    small = tiny_engine(max_kv_tokens=8)
    object.__setattr__(small, "_fingerprint", engine.fingerprint)
    with pytest.raises(MinipsError, match="loading 3 branches needs"):
        load_branches(small, tmp_path / "saved")
    branches[1].close()
    with pytest.raises(MinipsError, match="branch 1 is closed"):
        save_branches(branches, tmp_path / "none")
    assert small.check() and not (tmp_path / "none").exists()


@pytest.mark.parametrize("options", [{"layout": "parallel"}, {"branch_temperature": 0.5, "layout": "sequential"}])
def test_a_merged_context_is_no_branch_to_save(tmp_path, options):
    engine = tiny_engine()
    with Synthesizer(engine, options=options).merge(branches_of(engine)) as context:
        with pytest.raises(MinipsError, match="branch 0 is, or goes on from, a merged context"):
            engine.save_branches([context.branch], tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("dtype, kv_dtype", [(torch.float16, "auto"), (torch.float32, "int8"), (torch.float32, "fp8")])
def test_values_too_large_for_this_cache_are_refused(tmp_path, dtype, kv_dtype):
    live, base = tiny_engine(), tiny_engine(dtype=dtype)
    save_branches(branches_of(live), tmp_path / "saved")
    rewritten(tmp_path / "saved", lambda tensors, data: tensors["keys.1"].fill_(3e38) is None)
    engine = Engine(base.model, base.config, settings=EngineConfig("cpu", "auto", kv_dtype, 4, 1200))
    with pytest.raises(MinipsError, match=r"branch-001.safetensors: keys.1 holds values that are not finite numbers in a cache of torch\."):
        load_branches(engine, tmp_path / "saved", force=True)
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_a_segment_before_position_0_is_refused(tmp_path):
    engine = tiny_engine()
    save_branches(branches_of(engine), tmp_path / "saved")
    rewritten(tmp_path / "saved", lambda tensors, data: data["segments"][0].update(start=200))
    with pytest.raises(MinipsError, match="branch-001.safetensors: a segment would start before position 0"):
        load_branches(engine, tmp_path / "saved", start=3)


def test_arguments_of_the_wrong_kind_say_so(tmp_path):
    engine = tiny_engine()
    branch = branches_of(engine)[0]
    for tokens in (5, (5,), (1, 2, 3), {}, "ab"):
        with pytest.raises(MinipsError, match="tokens is .*, expected two numbers"):
            engine.save_branches([branch], tmp_path / "saved", tokens=tokens)
    for folder in (None, 5, b"x", ["x"]):
        with pytest.raises(MinipsError, match="save_branches: folder is .*, expected a path"):
            engine.save_branches([branch], folder)
        with pytest.raises(MinipsError, match="load_branches: folder is .*, expected a path"):
            engine.load_branches(folder)
    for branches in (5, "x", [None], {}, iter([branch])):
        with pytest.raises(MinipsError, match="was given, expected branches"):
            save_branches(branches, tmp_path / "saved")
    longest = tmp_path / ("n" * 255)  # the folder that it is written in first has a name too
    assert engine.load_branches(engine.save_branches([branch], longest))[0].token_ids == branch.token_ids


SCRIPT = """
import sys
from minips import Engine, SamplingParams, Synthesizer
engine = Engine.from_pretrained(sys.argv[1])
branches = engine.load_branches(sys.argv[2])
out = Synthesizer(engine).generate_from_caches(branches, "Which fruit is best?", SamplingParams(max_tokens=8))
print(out.token_ids, engine.stats()["prefilled_tokens"] == out.prefilled_tokens)
"""


def test_another_process_synthesizes(tmp_path, default_model):
    engine = Engine.from_pretrained(str(default_model))
    with engine.prefill("Name a fruit.") as root:
        branches = engine.decode(engine.fork(root, ["A red one.", "A long one."]), SamplingParams(max_tokens=6))
    engine.save_branches(branches, tmp_path / "saved")
    out = Synthesizer(engine).generate_from_caches(branches, "Which fruit is best?", SamplingParams(max_tokens=8))
    command = [sys.executable, "-c", SCRIPT, str(default_model), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{out.token_ids} True\n", done.stderr
