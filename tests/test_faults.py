"""Items of FAULTS that no other file holds with their own numbers, and the map of all of them in FAULTS_COVERED.md."""

import ast
import re
import socket
from pathlib import Path

import pytest
import torch

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.branch_files import save_branches
from minips.config import MergeOptions, ModelConfig
from minips.mapper import MapperConfig
from minips.rope import apply_rope
from minips.training.loss import Item, batch_loss
from minips.training.network import Network
from minips.weights import expected_shapes

from .support import LOGITS, U, branches_of, prompt_ids, random_tensors, relative_error, tiny_config, tiny_engine
from .tiny_folder import write_model

TESTS = Path(__file__).parent
LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


def test_the_map_names_all_items_and_only_tests_that_are_there():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", (TESTS / "FAULTS_COVERED.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 96))
    known = {}
    for number, _, held in rows:
        named = re.findall(r"`(\w+)::(\w+)`", held)
        assert named or held.startswith(("pending", "cannot apply")), f"item {number} has neither a test nor a reason"
        for file, name in named:
            path = TESTS / f"{file}.py"
            if file not in known:
                known[file] = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            assert name.startswith("test_") and name in known[file], f"item {number}: {file}::{name}"


def test_a_tied_head_is_counted_once():  # FAULTS 4
    tied, untied = (expected_shapes(ModelConfig.from_dict({**LLAMA_1B, "tie_word_embeddings": tie})) for tie in (True, False))
    assert 2 * torch.Size(tied["model.embed_tokens.weight"]).numel() == 525_336_576
    assert set(untied) - set(tied) == {"lm_head.weight"}


def test_local_folders_and_offline_hub_ids_open_no_socket(tmp_path, monkeypatch):  # FAULTS 11
    def refused(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    assert Engine.from_pretrained(write_model(tmp_path / "local"), max_kv_tokens=64).prefill([1, 2]).num_cached == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MinipsError, match="HF_HUB_OFFLINE is set"):
        Engine.from_pretrained("no-such-organisation/no-such-model")


def test_nothing_is_written_past_the_capacity():  # FAULTS 40: 32 tokens; 30 + 10, and 5 more behind 30
    engine = tiny_engine(page_size=16, max_kv_tokens=32)
    with pytest.raises(MinipsError, match="needs 3 pages of 16 tokens, 2 of 2 are free"):
        engine.generate(prompt_ids(30), SamplingParams(max_tokens=10))
    branch = engine.prefill(prompt_ids(30))
    before = [tensor.clone() for tensor in (*engine.pool.keys, *engine.pool.values)]
    for call in (lambda: engine.extend([branch], [prompt_ids(5)]), lambda: engine.decode([branch], SamplingParams(max_tokens=10))):
        with pytest.raises(MinipsError, match="1 page.*of 16 tokens, 0 of 2 are free"):
            call()
    assert all(torch.equal(old, new) for old, new in zip(before, (*engine.pool.keys, *engine.pool.values))) and branch.num_cached == 30


def test_sixteen_prompts_with_and_without_a_cached_prefix():  # FAULTS 43
    engine, rows = tiny_engine(max_kv_tokens=4000), [prompt_ids(5 + 35 * i // 15, i) for i in range(16)]
    roots = [engine.prefill(row[: len(row) // 2]) if i % 3 == 0 else None for i, row in enumerate(rows)]
    branches = [engine.prefill(row) if root is None else engine.fork(root, [row[len(row) // 2 :]])[0] for root, row in zip(roots, rows)]
    engine.decode(branches, SamplingParams(max_tokens=4))
    alone = tiny_engine(max_kv_tokens=100)
    for row, branch in zip(rows, branches):
        with alone.prefill(row) as solo:
            assert branch.output_ids == alone.decode([solo], SamplingParams(max_tokens=4))[0].output_ids


def test_kept_logits_are_copies():  # FAULTS 56, as far as it goes without graphs
    engine = tiny_engine()
    branch = engine.prefill(prompt_ids(5))
    kept = [branch.next_logits]
    copies = [kept[0].clone()]
    for _ in range(3):
        engine.decode([branch], SamplingParams(max_tokens=2, return_logits=True))
        kept += [branch.next_logits, branch.logits]
        copies += [branch.next_logits.clone(), branch.logits.clone()]
    assert all(torch.equal(one, two) for one, two in zip(kept, copies)) and not torch.equal(kept[0], kept[1])


def test_a_branch_that_stands_5_positions_off_changes_the_answer():  # FAULTS 76
    engine = tiny_engine()
    synthesizer, found = Synthesizer(engine), []
    for delta in (0, 5):
        with synthesizer.merge(branches_of(engine)) as context:
            segment = context.branch.segments[1]
            slots = engine.pool.slots(segment.pages, segment.length)
            cos, sin = engine.model.rope.tables(torch.tensor([delta]))
            for keys in engine.pool.keys:
                keys.flatten(0, 1)[slots] = apply_rope(keys.flatten(0, 1)[slots], cos, sin)
            found.append(synthesizer.generate(context=context, prompt=U, params=LOGITS).logits[: len(U)])
    assert relative_error(found[1], found[0]) > 1e-2


def test_four_workers_on_a_long_prefix():  # FAULTS 82
    config = tiny_config(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=8192)
    engine = tiny_engine(config, page_size=32, max_kv_tokens=8192)
    with engine.prefill(prompt_ids(7403)) as prefix:
        assert engine.stats()["prefilled_tokens"] == 7403
        before = engine.stats()
        engine.fork(prefix, [prompt_ids(25, i) for i in range(4)])
        after = engine.stats()
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == 4 * 25 and after["copied_tokens"] == 0
    assert before["free_pages"] - after["free_pages"] <= 4 and after["reused_tokens"] == 4 * 7403


def test_a_saved_branch_has_the_size_of_its_tokens(tmp_path):  # FAULTS 86: the cache of Llama 3.2 1B, 20 tokens of 1,000 pages
    config = tiny_config(**{**LLAMA_1B, "vocab_size": 97, "hidden_size": 16, "intermediate_size": 16})
    engine = tiny_engine(config, dtype=torch.bfloat16, page_size=1, max_kv_tokens=1000)
    assert engine.kv_bytes_per_token == 32_768
    save_branches([engine.prefill(prompt_ids(20))], tmp_path / "saved", tokens=(0, 20))
    path = tmp_path / "saved" / "branch-000.safetensors"
    assert path.stat().st_size == 655_360 + 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_end_tokens_in_the_target_are_learnt():  # FAULTS 92: no row is padded, so no token can be taken for padding
    engine = tiny_engine(tiny_config(eos_token_id=2))
    branch = engine.encode([engine.prefill([5, 6])], [[7]])[0]
    item = Item([branch], [10, 11], [12, 13, 2])
    loss, count = batch_loss(Network(engine, MapperConfig("low_rank"), rank=4), [item], MergeOptions())
    synthesizer = Synthesizer(engine)
    with synthesizer.merge([branch], consume=False) as context:
        scores = synthesizer.score(context, [10, 11], [12, 13, 2])
    assert count == len(scores.logprobs) == 3 and loss.item() == pytest.approx(scores.mean_nll, rel=1e-5)


@pytest.mark.parametrize("lengths", [[5], [50], [5, 50]])
def test_the_loss_of_uniform_logits_over_4_classes(lengths):  # FAULTS 93
    config = tiny_config(vocab_size=4)
    tensors = {**random_tensors(config), "lm_head.weight": torch.zeros(4, config.hidden_size)}
    engine = tiny_engine(config, tensors=tensors)
    root = engine.prefill([1, 2])
    items = [Item(engine.encode(engine.fork(root, [[3]]), [[1]]), [2], prompt_ids(length, length, 4)) for length in lengths]
    loss, count = batch_loss(Network(engine, MapperConfig("low_rank"), rank=4), items, MergeOptions())
    assert count == sum(lengths) and loss.item() == pytest.approx(1.386294, abs=1e-6)
