"""The release's training steps, reproduced: loss, every gradient, and the parameters after one and five AdamW steps."""

import json

import pytest
import torch
from safetensors.torch import load_file

from minips import MinipsError
from minips.adapter import Adapter, load_adapter
from minips.config import MergeOptions
from minips.lora import LoRALinear
from minips.mapper import MapperConfig
from minips.merge import plan_merge
from minips.training.loss import Item, MergedCaches, batch_loss
from minips.training.network import Network

from .support import GOLDEN, OUTS, OWNS, U, branches_of, golden_engine, prompt_ids, relative_error, tiny_engine, u_logits

CASES = ["llama_fixed_text_m2_prefix", "qwen3_fixed_text_m3"]
OFFICIAL = MergeOptions(profile="official")


def given_branches(engine, case):
    """The fixed-text route: raw ids, of which the last `extract_tokens` are kept."""
    branches = []
    for entry in case["branches"]:
        ids, kept = entry["prefill_ids"], entry["extract_tokens"]
        root = engine.prefill(ids[: len(ids) - kept]) if kept < len(ids) else engine.empty_branch()
        branches += engine.encode([root], [ids[len(ids) - kept :]])
    return branches


def released_network(engine, case):
    """A network that starts from a released component folder."""
    released = load_adapter(GOLDEN / case["components"], engine.model, lambda: engine.fingerprint)
    pairs = released.lora.pairs
    network = Network(engine, MapperConfig("affine"), rank=4, alpha=8)
    network.mapper.load_state_dict(released.mapper.state_dict())
    for name, module in network.model.named_modules():
        if isinstance(module, LoRALinear):
            a, b, scale = pairs[name]
            assert scale == module.scale
            module.lora_A.data, module.lora_B.data = a.float().clone(), b.float().clone()
    return network


def golden_name(name):
    """Our name of a trainable tensor -> the fixture's."""
    if name.startswith("mapper."):
        return name
    module, part = name.removeprefix("lora.").rsplit(".", 1)
    return f"lora.base_model.model.{module}.{part}.default.weight"


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_steps_of_the_release(name):
    case = json.loads((GOLDEN / "train" / f"{name}.json").read_text())
    golden = load_file(GOLDEN / "train" / f"{name}.safetensors")
    engine = golden_engine(case["model"].split("/")[-1])
    network, branches = released_network(engine, case), given_branches(engine, case)
    split = case["labels"].count(-100)
    item = Item(branches, case["input_ids"][:split], case["input_ids"][split:])
    plan = plan_merge(branches, OFFICIAL, 4096, lossy=False)
    caches = MergedCaches([plan], engine.pool, network.model.rope, network.mapper)
    assert plan.next_position == case["position_offset"] and caches.lengths == [sum(b["kept_len"] for b in case["branches"])]
    for layer in range(engine.config.num_hidden_layers):
        for part, found in zip("kv", caches.read(layer, torch.float32)[0]):
            expected = torch.cat([golden[f"branch{i}.mapped.{part}"][layer] for i in range(len(branches))], 1).transpose(0, 1)
            assert relative_error(found.detach(), expected) < 1e-4
    optimizer = torch.optim.AdamW(network.trainable().values(), lr=case["optimizer"]["lr"], weight_decay=0.0)
    base = {key: tensor.clone() for key, tensor in engine.model.state_dict().items()}
    for step in range(5):
        loss, count = batch_loss(network, [item], OFFICIAL)
        assert count == case["target_tokens"] and loss.item() == pytest.approx(case["losses"][step], rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            grads = {key for key in golden if key.startswith("grad.")}
            assert grads == {f"grad.{golden_name(key)}" for key in network.trainable()}
            for key, tensor in network.trainable().items():
                assert relative_error(tensor.grad, golden[f"grad.{golden_name(key)}"]) < 1e-4, key
            assert all(tensor.grad is None for _, tensor in network.frozen())
        optimizer.step()
        if step in (0, 4):
            for key, tensor in network.trainable().items():
                assert relative_error(tensor.detach(), golden[f"after_step{step + 1}.{golden_name(key)}"]) < 1e-4, key
    assert all(torch.equal(base[key], tensor) for key, tensor in engine.model.state_dict().items()), "the base never changes"


def items_of(engine):
    branches = branches_of(engine)
    return [Item(branches, U, prompt_ids(5, 80)), Item(branches[:2], prompt_ids(3, 81), prompt_ids(9, 82)), Item(branches[1:], U, [4])]


@pytest.mark.parametrize("kind", ["none", "affine", "linear", "low_rank", "normalize"])
@pytest.mark.parametrize("options", [{}, {"keep_prefix": False}, {"layout": "sequential"}])
def test_the_loss_is_what_the_engine_scores(kind, options):
    """A fresh mapper is the identity (but for kind normalize) and LoRA adds nothing: the loss is the synthesizer's own NLL of the target."""
    from minips import Synthesizer

    engine = tiny_engine()
    options = MergeOptions(**options, **({"anchor": "fork"} if options.get("keep_prefix") is False else {}))
    network, items = Network(engine, MapperConfig(kind), rank=4), items_of(engine)
    synthesizer = Synthesizer(engine, options=options)
    synthesizer.mapper = network.mapper if kind == "normalize" else None
    total = 0.0
    for item in items:
        with synthesizer.merge(item.branches, consume=False) as context:
            scores = synthesizer.score(context, item.prompt, item.target)
        loss, count = batch_loss(network, [item], options)
        assert count == len(item.target) and loss.item() == pytest.approx(scores.mean_nll, rel=1e-4)
        total += scores.mean_nll * count
    loss, count = batch_loss(network, items, options)
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


def test_a_batch_is_the_mean_over_its_target_tokens():  # FAULTS 92, 93
    engine = tiny_engine()
    network, items = Network(engine, MapperConfig("low_rank"), rank=4), items_of(engine)
    alone = [batch_loss(network, [item], MergeOptions()) for item in items]
    together, count = batch_loss(network, items, MergeOptions())
    assert count == sum(n for _, n in alone) == 15
    assert together.item() == pytest.approx(sum(loss.item() * n for loss, n in alone) / count, rel=1e-5)
    checkpointed, _ = batch_loss(network, items, MergeOptions(), layer_checkpoints=True)
    together.backward()
    grads = {key: tensor.grad.clone() for key, tensor in network.trainable().items() if tensor.grad is not None}
    network.model.zero_grad()
    network.mapper.zero_grad()
    checkpointed.backward()
    assert checkpointed.item() == pytest.approx(together.item(), rel=1e-6)
    for key, tensor in network.trainable().items():
        assert relative_error(tensor.grad, grads[key]) < 1e-5 or not grads[key].any(), key


@pytest.mark.parametrize("kind", ["affine", "linear", "low_rank"])
def test_gradients_equal_finite_differences(kind):
    engine = tiny_engine()
    network, items = Network(engine, MapperConfig(kind), rank=3), items_of(engine)[:2]
    generator = torch.Generator().manual_seed(3)
    for tensor in network.trainable().values():
        tensor.data += 0.05 * torch.randn(tensor.shape, generator=generator)
    loss, _ = batch_loss(network, items, MergeOptions())
    loss.backward()
    for key, tensor in network.trainable().items():
        direction = torch.randn(tensor.shape, generator=generator)
        direction, step = direction / direction.norm(), 5e-3
        slope = float((tensor.grad * direction).sum())
        start, values = tensor.detach().clone(), {}
        with torch.no_grad():
            for steps in (-2, -1, 1, 2):
                tensor.copy_(start + steps * step * direction)
                values[steps] = batch_loss(network, items, MergeOptions())[0].item()
            tensor.copy_(start)
        measured = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * step)  # fourth order: fp32 allows no smaller step
        assert slope == pytest.approx(measured, rel=0.03, abs=3e-3), key


def test_trained_parts_act_in_the_engine_as_in_training(tmp_path):
    """After some steps: the loss of the merged, in-place context with the folded LoRA equals the training loss."""
    from minips import Synthesizer

    engine = tiny_engine()
    network, item = Network(engine, MapperConfig("low_rank", rank=4), rank=4), items_of(engine)[0]
    optimizer = torch.optim.AdamW(network.trainable().values(), lr=2e-2)
    first = None
    for _ in range(8):
        loss, _ = batch_loss(network, [item], MergeOptions())
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = batch_loss(network, [item], MergeOptions())[0].item()
    assert trained < first - 0.5
    adapter = Adapter("trained", network.mapper, network.adapter(), MergeOptions())
    synthesizer = Synthesizer(engine, adapter)
    with synthesizer.merge(item.branches, consume=False) as context:
        assert synthesizer.score(context, item.prompt, item.target).mean_nll == pytest.approx(trained, rel=1e-3)


def test_what_cannot_be_trained_is_refused():
    engine = tiny_engine()
    branches = branches_of(engine)
    network = Network(engine, MapperConfig("none"), rank=0)
    assert network.trainable() == {} and network.mapper is None and network.adapter() is None
    for item, message in ((Item(branches, [], [1]), "no prompt"), (Item(branches, [1], []), "no prompt or no target")):
        with pytest.raises(MinipsError, match=message):
            batch_loss(network, [item], MergeOptions())
    with pytest.raises(MinipsError, match="positions"):
        batch_loss(network, [Item(branches, prompt_ids(200), prompt_ids(60))], MergeOptions())
    with pytest.raises(MinipsError, match="targets has 'x_proj'"):
        Network(engine, MapperConfig("none"), targets=("x_proj",))
    assert len(OWNS) == len(OUTS) == 3 and u_logits(engine, branches).shape[0] == len(U)
