"""Training runs: resumed runs equal whole ones byte for byte, broken ones stop by name, and what is saved is what was trained."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minips import MinipsError, Synthesizer
from minips.training import trainer as module
from minips.training.checkpoints import checkpoints
from minips.training.config import TrainConfig
from minips.training.loss import batch_loss
from minips.training.trainer import Example, Trainer, encode

from .evaluation_support import text_engine

EXAMPLES = [
    Example(
        f"row{i}", f"Read about {w}. What is {w}?", (f"{w} is a {c} thing", "something else", f"a {c} day")[: 1 + i % 3], f"What is {w}?", c
    )
    for i, (w, c) in enumerate(
        [("rose", "red"), ("sky", "blue"), ("leaf", "green"), ("coal", "black"), ("milk", "white"), ("sun", "gold"), ("sea", "grey")]
    )
]
QUICK = {
    "steps": 6,
    "batch": 2,
    "warmup": 2,
    "mapper_lr": 3e-3,
    "lora_lr": 3e-3,
    "rank": 4,
    "checkpoint_every": 2,
    "mapper": {"kind": "low_rank", "rank": 4},
}


def config(**changes):
    return TrainConfig(**{**QUICK, **changes})


def trained(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.network.trainable().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_falls_and_the_engine_gets_what_was_trained(tmp_path):
    engine, said = text_engine(), []
    trainer = Trainer(config(steps=30, batch=4, schedule="constant"), engine, EXAMPLES, tmp_path / "run", on_step=said.append)
    trainer.train()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.6 * sum(losses[:5]) and said[-1]["step"] == 30 and said[-1]["seconds"] > 0
    assert engine.stats()["used_pages"] == 0 and engine.check()
    synthesizer = Synthesizer(engine, str(tmp_path / "run" / "adapter"))
    _, items, _ = encode(engine, EXAMPLES[:1], config())
    expected = batch_loss(trainer.network, items, trainer.config.merge_options())[0].item()
    with synthesizer.merge(items[0].branches, consume=False) as context:
        scores = synthesizer.score(context, items[0].prompt, items[0].target)
    assert scores.mean_nll == pytest.approx(expected, rel=1e-3)
    assert items[0].target[-1] == engine.chat.turn_end and items[0].target[-1] in engine.stop_ids, "FAULTS 92: the end is learnt"


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, cut):
    whole = Trainer(config(accumulation=2), text_engine(), EXAMPLES, tmp_path / "whole")
    whole.train()
    first = Trainer(config(accumulation=2), text_engine(), EXAMPLES, tmp_path / "cut")
    first.train(until=cut)
    if cut % 2:
        first.save()
    again = Trainer(config(accumulation=2), text_engine(), EXAMPLES, tmp_path / "cut")
    assert again.step == cut
    again.train()
    assert same(trained(whole), trained(again))
    files = [sorted(p.read_bytes() for p in (tmp_path / name / "adapter").iterdir()) for name in ("whole", "cut")]
    assert files[0] == files[1]
    assert len(checkpoints(tmp_path / "cut")) == 2 and checkpoints(tmp_path / "cut")[-1].name == "step-00000006"


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.test_trainer import EXAMPLES, config
from tests.evaluation_support import text_engine
from minips.training.trainer import Trainer
import torch
torch.set_num_threads(1)
trainer = Trainer(config(steps=8, checkpoint_every=1), text_engine(), EXAMPLES, sys.argv[1], say=lambda text: print(text, flush=True),
                  on_step=lambda entry: print("step", entry["step"], flush=True))
trainer.train()
"""


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(Path(__file__).parent.parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 4"):
            break
    time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and checkpoints(tmp_path / "run")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "going on from step" in done.stdout and done.returncode == 0, done.stderr
    plain = subprocess.run([*command[:3], str(tmp_path / "plain"), command[4]], capture_output=True, text=True, timeout=300, check=False)
    assert plain.returncode == 0
    for name in os.listdir(tmp_path / "plain" / "adapter"):
        assert (tmp_path / "plain" / "adapter" / name).read_bytes() == (tmp_path / "run" / "adapter" / name).read_bytes(), name


def test_ctrl_c_saves_and_gives_pages_back(tmp_path, monkeypatch):
    engine = text_engine()
    trainer = Trainer(config(checkpoint_every=100), engine, EXAMPLES, tmp_path / "run")
    real = module.batch_loss

    def interrupted(*arguments, **options):
        if trainer.step == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(module, "batch_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000003"]
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_broken_runs_stop_and_name_what_is_wrong(tmp_path, monkeypatch):  # FAULTS 95
    engine, real = text_engine(), module.batch_loss
    monkeypatch.setattr(module, "batch_loss", lambda *a, **o: (real(*a, **o)[0] * math.nan, 1))
    with pytest.raises(MinipsError, match=r"the loss of step 1 is nan, rows row\d, row\d; there is no checkpoint yet"):
        Trainer(config(), engine, EXAMPLES, tmp_path / "nan").train()
    monkeypatch.setattr(module, "batch_loss", real)

    detached = Trainer(config(mapper={"kind": "linear"}), engine, EXAMPLES, tmp_path / "detached")
    detached.network.mapper.map = lambda part, layer, x, coefficients, branch: x
    with pytest.raises(MinipsError, match="no gradient reached 4 tensors in two steps: mapper.key_bias, mapper.key_weight"):
        detached.train()

    leaking = Trainer(config(), engine, EXAMPLES, tmp_path / "leaking")
    leaking.network.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(MinipsError, match="base tensors got a gradient: model.norm.weight"):
        leaking.train()

    infinite = Trainer(config(), engine, EXAMPLES, tmp_path / "infinite")
    next(iter(infinite.network.trainable().values())).register_hook(lambda grad: grad * math.inf)
    with pytest.raises(MinipsError, match="the gradient of mapper.key_a is not finite in step"):
        infinite.train()
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_every_row_is_seen_once_an_epoch():
    engine = text_engine()
    trainer = Trainer(config(batch=3), engine, EXAMPLES, "unused")
    seen = [example.id for number in range(7) for example in trainer.batch_of(number)]
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == sorted(example.id for example in EXAMPLES)
    assert seen[:7] != seen[7:14] and not Path("unused").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"lora_lr": "fast"}, "lora_lr is 'fast'"),
        ({"clip": -1}, "clip is -1"),
        ({"schedule": "sudden"}, "schedule is 'sudden'"),
        ({"targets": ["x"]}, "targets is"),
        ({"targets": [["q_proj"]]}, "targets is"),
        ({"rank": 10**12}, "rank is 1000000000000, expected at most 4096"),
        ({"mapper": {"kind": "magic"}}, "kind is 'magic'"),
        ({"mapper": {"size": 3}}, "mapper is"),
        ({"options": {"layout": "round"}}, "layout is 'round'"),
        ({"options": {"colour": 1}}, "unknown option 'colour'"),
        ({"rank": 0, "mapper": {"kind": "none"}}, "nothing to train"),
        ({"options": {"keep_prefix": False}, "mapper": {"kind": "affine"}}, "anchor 'free'"),
        ({"speed": 1}, "unknown field 'speed'"),
    ],
)
def test_bad_configs_are_refused(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QUICK, **changes}))
    with pytest.raises(MinipsError, match=message):
        TrainConfig.from_file(path)


def test_rates_rise_and_fall():
    cosine, constant = config(steps=12), config(steps=12, schedule="constant")
    assert [cosine.rate(step) for step in (0, 1, 2, 7, 12)] == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert [constant.rate(step) for step in (0, 1, 11)] == [0.5, 1, 1]


def test_runs_do_not_mix(tmp_path):
    engine = text_engine()
    Trainer(config(), engine, EXAMPLES, tmp_path / "run").train(until=2)
    with pytest.raises(MinipsError, match="another config"):
        Trainer(config(lora_lr=1e-3), engine, EXAMPLES, tmp_path / "run")
    with pytest.raises(MinipsError, match="does not fit this run's mapper and LoRA"):
        Trainer(config(rank=8), engine, EXAMPLES, tmp_path / "run")
    with pytest.raises(MinipsError, match="no examples"):
        Trainer(config(), engine, [], tmp_path / "run")
