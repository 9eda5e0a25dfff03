"""`python -m minips.train` and `minips.distill`: recipes, the text rival, live workers, stages, and processes that share a batch."""

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.adapters import merge_adapters
from minips.chat import text_prompt
from minips.config import MergeOptions
from minips.corpus.mixture import read_examples
from minips.distill import DistillConfig, distill
from minips.mapper import MapperConfig
from minips.train import main, train
from minips.training.config import TrainConfig
from minips.training.curve import read_log, running_mean
from minips.training.distributed import device_of_process
from minips.training.encoding import Example, encode
from minips.training.loss import batch_loss
from minips.training.network import Network
from minips.training.trainer import Trainer

from .evaluation_support import text_engine
from .test_trainer import EXAMPLES, QUICK, same, trained
from .tiny_folder import write_model

ROOT = Path(__file__).parent.parent
TEXT = {"method": "text", "mapper": {"kind": "none"}}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**vars(e), "workers": None}) + "\n" for e in EXAMPLES))
    return path


def write_config(tmp_path, **changes):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**QUICK, "data": [{"file": "rows.jsonl"}], **changes}))
    return path


def test_the_command_line_trains_resumes_and_draws(tmp_path, rows, capsys):
    pytest.importorskip("matplotlib")
    model = write_model(tmp_path / "model")
    config = write_config(tmp_path, model=str(model), stages=[{}, {"steps": 3, "lora_lr": 1e-4}], average=0.25)
    call = [str(config), "--out", str(tmp_path / "run"), "--plot", str(tmp_path / "loss.png")]
    assert main(call) == 0
    out = capsys.readouterr()
    assert out.out.strip() == str(tmp_path / "run" / "adapter") and "step 6 of 6: loss" in out.err and "tokens/s" in out.err
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    expected = merge_adapters(
        tmp_path / "run/stage-2/adapter", tmp_path / "run/stage-1/adapter", tmp_path / "expected", weight=0.25, mapper="a"
    )
    for name in ("adapter_model.safetensors", "mapper.safetensors"):
        assert (expected / name).read_bytes() == (tmp_path / "run/adapter" / name).read_bytes()
    assert Synthesizer(Engine.from_pretrained(model, max_kv_tokens=512), str(tmp_path / "run/adapter"))
    assert main(call) == 0  # nothing left to do
    assert len(read_log(tmp_path / "run/stage-1/log.jsonl")) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepz": 3}, "unknown field 'stepz'"),
        ({"stages": []}, "stages is [], expected a list of objects"),
        ({"average": 0.5}, "average is 0.5, expected a number from 0 to 1, and two stages"),
        ({"method": "text"}, "method text reads no caches"),
        ({"data": []}, "data is missing"),
        ({"data": "nq_open"}, "data is 'nq_open', expected a list"),
        ({"start": "nowhere"}, "adapter 'nowhere' was not found"),
        ({"lora_lr": float("nan")}, "lora_lr is nan"),
    ],
)
def test_a_recipe_that_is_wrong_gives_one_line(tmp_path, rows, capsys, changes, said):
    model = write_model(tmp_path / "model")
    assert main([str(write_config(tmp_path, model=str(model), **changes)), "--out", str(tmp_path / "run"), "--quiet"]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_stage_starts_from_the_adapter_before(tmp_path):
    engine = text_engine()
    first = Trainer(TrainConfig(**QUICK), engine, EXAMPLES, tmp_path / "one")
    first.train()
    second = Trainer(TrainConfig(**{**QUICK, "start": str(tmp_path / "one/adapter")}), engine, EXAMPLES, tmp_path / "two")
    assert same(trained(first), trained(second))
    place = second.write_adapter(tmp_path / "three")
    assert json.loads((place / "minips.json").read_text())["training"]["config"]["start"] == "one/adapter"
    with pytest.raises(MinipsError, match="start: .*adapter has another mapper or LoRA"):
        Trainer(TrainConfig(**{**QUICK, "rank": 2, "start": str(tmp_path / "one/adapter")}), engine, EXAMPLES, tmp_path / "three")


def test_the_text_rival_trains_on_what_the_text_method_reads(tmp_path):
    engine = text_engine()
    trainer = Trainer(TrainConfig(**{**QUICK, **TEXT, "steps": 30, "batch": 4}), engine, EXAMPLES, tmp_path / "run")
    trainer.train()
    losses = [entry["loss"] for entry in read_log(tmp_path / "run/log.jsonl")]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]) and engine.stats()["used_pages"] == 0
    _, items, _ = encode(engine, EXAMPLES[2:3], trainer.config)
    e = EXAMPLES[2]
    assert items[0].prompt == engine.prompts.encode(text_prompt(e.prefix, e.branches, e.prompt), "full") and not items[0].branches
    loss = batch_loss(trainer.network, items, trainer.config.merge_options())[0].item()
    folded = Synthesizer(engine, str(tmp_path / "run/adapter"))
    from minips.answering import score_ids

    scores = score_ids(engine, [engine.empty_branch()], [items[0].prompt], [items[0].target], folded.model)[0]
    assert scores.mean_nll == pytest.approx(loss, rel=1e-3)


def test_training_keys_and_values_are_the_engines(tmp_path):
    engine = text_engine()
    opened, items, _ = encode(engine, EXAMPLES, TrainConfig(**QUICK))
    for example, item in zip(EXAMPLES, items):
        prefix = engine.prefill(example.prefix)
        plain = engine.encode(engine.fork(prefix, [""] * len(example.branches)), list(example.branches))
        for ours, theirs in zip(item.branches, plain, strict=True):
            assert ours.token_ids == theirs.token_ids and [s.role for s in ours.segments] == [s.role for s in theirs.segments]
            assert ours.fork_depth == theirs.fork_depth
            for tensors in (engine.pool.keys, engine.pool.values):
                one, two = (
                    torch.cat([tensors[1].flatten(0, 1)[engine.pool.slots(s.pages, s.length)] for s in b.segments]) for b in (ours, theirs)
                )
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert all(b.segments[0] is item.branches[0].segments[0] for item in items for b in item.branches)
    for branch in opened:
        branch.close()


def test_live_workers_decode_the_same_whatever_the_batch(tmp_path):
    engine = text_engine()
    live = [Example(f"l{i}", f"Task {i}", (), "Sum up.", "blue", workers=("", "be short")) for i in range(3)]
    config = TrainConfig(**{**QUICK, "worker_tokens": 5})
    opened, items, _ = encode(engine, live, config, step=7)
    alone, single, _ = encode(engine, live[1:2], config, step=7)
    assert [b.output_ids for b in items[1].branches] == [b.output_ids for b in single[0].branches]
    other, later, _ = encode(engine, live[1:2], config, step=8)
    assert [b.output_ids for b in later[0].branches] != [b.output_ids for b in single[0].branches]
    for branch in (*opened, *alone, *other):
        branch.close()
    trainer = Trainer(config, engine, [*EXAMPLES, *live], tmp_path / "run")
    trainer.train()
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_rows_that_do_not_fit_are_skipped_and_counted(tmp_path):
    engine = text_engine()
    long = Example("long", "p", ("x" * 300, "y"), "u", "z")
    trainer = Trainer(TrainConfig(**{**QUICK, "most_tokens": 200}), engine, [*EXAMPLES, long], tmp_path / "run")
    trainer.train()
    assert sum(entry.get("skipped", 0) for entry in read_log(tmp_path / "run/log.jsonl")) >= 1 and engine.check()
    longer = Example("longer", "p", ("x" * 30, "y" * 5000), "u", "z")  # than the model's positions
    opened, items, skipped = encode(engine, [EXAMPLES[0], longer, EXAMPLES[1]], TrainConfig(**QUICK))
    assert skipped == ["longer"] and len(items) == 2
    for branch in opened:
        branch.close()
    with pytest.raises(MinipsError, match="no row of step 1 fits: long, long"):
        Trainer(TrainConfig(**{**QUICK, "most_tokens": 200}), engine, [long], tmp_path / "none").train()


@pytest.mark.parametrize(
    "asked, gpus, local, found",
    [("auto", 4, 2, "cuda:2"), ("cuda", 4, 0, "cuda:0"), ("cpu", 4, 1, "cpu"), ("cuda:3", 4, 1, "cuda:3"), ("auto", 0, 1, "auto"), ("auto", 2, 2, None)],
)
def test_each_process_of_torchrun_has_its_own_gpu(monkeypatch, asked, gpus, local, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_of_process(asked) == asked  # without torchrun
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(local))
    if found is None:
        with pytest.raises(MinipsError, match="process 2 of this machine has no GPU of its own, there are 2"):
            device_of_process(asked)
    else:
        assert device_of_process(asked) == found


WORKER = """
import sys, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from tests.test_trainer import EXAMPLES, QUICK
from tests.evaluation_support import text_engine
from minips.training.config import TrainConfig
from minips.training.trainer import Trainer
trainer = Trainer(TrainConfig(**{**QUICK, "batch": 3, "steps": 4}), text_engine(), EXAMPLES, sys.argv[1])
trainer.train()
trainer.group.close()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_processes_that_share_a_batch_end_where_one_does(tmp_path):
    alone = Trainer(TrainConfig(**{**QUICK, "batch": 3, "steps": 4}), text_engine(), EXAMPLES, tmp_path / "alone")
    alone.train()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "two"), str(ROOT)], env={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("alone", "two"))
    assert [e["target_tokens"] for e in one] == [e["target_tokens"] for e in two]
    assert [e["loss"] for e in one] == pytest.approx([e["loss"] for e in two], rel=1e-4)
    again = Trainer(alone.config, text_engine(), EXAMPLES, tmp_path / "two")
    assert again.step == 4
    for name, tensor in trained(alone).items():
        torch.testing.assert_close(tensor, trained(again)[name], rtol=1e-3, atol=1e-4)


def test_accumulated_batches_are_one_large_batch(tmp_path):
    logs = []
    for name, batch, accumulation in (("one", 4, 1), ("two", 2, 2)):
        Trainer(TrainConfig(**{**QUICK, "batch": batch, "accumulation": accumulation}), text_engine(), EXAMPLES, tmp_path / name).train()
        logs.append([entry["loss"] for entry in read_log(tmp_path / name / "log.jsonl")])
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)


def test_distilled_targets_are_the_text_methods_own_ids(tmp_path, rows):
    engine = text_engine()
    config = DistillConfig(data=({"file": "rows.jsonl"},), max_tokens=40, temperature=0.9, batch=3)
    out, said = tmp_path / "made.jsonl", []
    distill(config, out, base=tmp_path, engine=engine, say=said.append)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == len(EXAMPLES) and {line["id"] for line in lines} == {e.id for e in EXAMPLES}
    made = {example.id: example for example in read_examples(out)}
    for example in EXAMPLES:
        if example.id in made:
            seed = random.Random(f"0 {(example.id, 'target')}").getrandbits(63)
            params = SamplingParams(max_tokens=40, temperature=0.9, seed=seed)
            result = engine.generate(text_prompt(example.prefix, example.branches, example.prompt), params)
            assert list(made[example.id].target) == result.token_ids and made[example.id].branches == example.branches
    cut = out.read_text()[:-20]  # killed while writing the last line
    out.write_text(cut)
    distill(config, out, base=tmp_path, engine=engine)
    assert sorted(out.read_text().splitlines()) == sorted(json.dumps(line) for line in lines)
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_rows_hold_every_character_and_survive_a_cut_anywhere(tmp_path, rows):
    """Line separators of Unicode and halves of surrogates are part of a text; a kill may leave half a character."""
    engine, out = text_engine(), tmp_path / "out.jsonl"
    strange = [{"id": f"s{at}", "prefix": f"a\u2028b{char}", "branches": ["c\u0085", "d"], "prompt": "e\u2029", "target": "f"} for at, char in enumerate("xyz")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in strange), encoding="utf-8")
    config = DistillConfig(data=({"file": "rows.jsonl"},), max_tokens=8, batch=2)
    distill(config, out, base=tmp_path, engine=engine)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] and len(lines) == 3
    for cut in (lines[0] + lines[1][:9], lines[0] + b'{"id": "\xe2\x80', lines[0][:3], b""):
        out.write_bytes(cut)
        distill(config, out, base=tmp_path, engine=engine)
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    for other in (b"my notes", b"\xff\xfe\n", b"{}\n"):
        out.write_bytes(other)
        with pytest.raises(MinipsError, match="is no file of distilled rows"):
            distill(config, out, base=tmp_path, engine=engine)
        assert out.read_bytes() == other
    for entry, said in (({"name": []}, "name is"), ({"name": {}}, "name is"), ({"file": "a\0b"}, "no file")):
        with pytest.raises(MinipsError, match=said):
            distill(DistillConfig(data=(entry,)), out, base=tmp_path, engine=engine)
    with pytest.raises(MinipsError, match="is no folder, expected the data folder"):
        distill(config, tmp_path / "x.jsonl", data=tmp_path / "nope", base=tmp_path, engine=engine)
    with pytest.raises(MinipsError, match="is no file name"):
        distill(config, "a\0b", base=tmp_path, engine=engine)


def test_running_mean():
    assert running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


def test_weighting_by_example_is_the_mean_of_the_means():
    engine = text_engine()
    network = Network(engine, MapperConfig("linear"), rank=2)
    uneven = [replace(EXAMPLES[0], target="a"), replace(EXAMPLES[1], target="a much longer target than the other one")]
    _, items, _ = encode(engine, uneven, TrainConfig(**QUICK))
    alone = [batch_loss(network, [item], MergeOptions())[0].item() for item in items]
    loss, weight = batch_loss(network, items, MergeOptions(), weighting="example")
    assert weight == 2 and loss.item() == pytest.approx(sum(alone) / 2, rel=1e-5)
    by_token, tokens = batch_loss(network, items, MergeOptions())
    assert tokens == sum(len(item.target) for item in items) and by_token.item() != pytest.approx(loss.item(), rel=1e-3)


def test_an_adapter_that_another_config_made_is_not_taken_for_this_one_s(tmp_path):
    engine, rows = text_engine(), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(vars(example)) + "\n" for example in EXAMPLES), encoding="utf-8")
    config = TrainConfig(**{**QUICK, "steps": 2, "data": [{"file": str(rows)}]})
    made = train(config, tmp_path / "run", engine=engine)
    assert train(config, tmp_path / "run", engine=engine) == made
    with pytest.raises(MinipsError, match="run.adapter: is there already, and was not made by this config"):
        train(replace(config, mapper={"kind": "linear"}), tmp_path / "run", engine=engine)
    (tmp_path / "empty" / "adapter").mkdir(parents=True)
    with pytest.raises(MinipsError, match="is there already"):
        train(config, tmp_path / "empty", engine=engine)
