"""The published release's synthesis cases and memory modes, through the public API: workers' prompts in, logits out."""

import json

import pytest
import torch
from safetensors.torch import load_file

from minips import MergeOptions, SamplingParams, Synthesizer
from tests.support import GOLDEN, golden_engine, relative_error

CASES = sorted(path.stem for path in (GOLDEN / "cases").glob("*.json"))


def load(name):
    case = json.loads((GOLDEN / "cases" / f"{name}.json").read_text())
    return case, load_file(GOLDEN / "cases" / f"{name}.safetensors"), case["model"].split("/")[-1]


def decode_workers(engine, case):
    stop = () if case["eos_token_id"] is None else (case["eos_token_id"],)
    roots = [engine.prefill(branch["prompt_ids"]) for branch in case["branches"]]
    each = [SamplingParams(max_tokens=b["max_new_tokens"], stop_token_ids=stop) for b in case["branches"]]
    return engine.decode(roots, each)


def cached(engine, context, first, count):
    """Keys and values [layers, kv_heads, count, head_dim] of a context's tokens from `first` on."""
    pool = engine.pool
    slots = torch.cat([pool.slots(s.pages, s.length) for s in context.branch.segments])[first : first + count]
    return [torch.stack([t.flatten(0, 1)[slots] for t in part]).transpose(1, 2) for part in (pool.keys, pool.values)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("page_size", [4, 64])
def test_workers_and_synthesis_equal_the_release(name, page_size):
    case, tensors, model = load(name)
    engine = golden_engine(model, page_size=page_size)
    engine.valid_vocab = len(tensors["judger.last_logits.none"])  # one release cuts the vocabulary of workers and synthesizer
    branches = decode_workers(engine, case)
    for branch, expected in zip(branches, case["branches"]):
        stopped = expected["ended_with_eos"]
        assert branch.output_ids == (expected["output_ids"][:-1] if stopped else expected["output_ids"])
        assert branch.finish_reason == ("stop" if stopped else "length")
    u, stop = case["judger_prompt_ids"], () if case["eos_token_id"] is None else (case["eos_token_id"],)
    for parts in ("none", "mapper_only", "lora_only", "both"):
        synthesizer = Synthesizer(engine, GOLDEN / case["components"], parts=parts)
        assert synthesizer.options == MergeOptions(profile="official")
        with synthesizer.merge(branches, consume=parts == "both") as context:
            assert context.branch_tokens == [b["kept_len"] for b in case["branches"]]
            assert context.branch.next_position == case["position_offset"]
            at, mapped = 0, parts in ("both", "mapper_only")
            for j, count in enumerate(context.branch_tokens):
                keys, values = cached(engine, context, at, count)
                assert relative_error(keys, tensors[f"branch{j}.{'mapped' if mapped else 'shifted'}.k"]) < 1e-4
                assert relative_error(values, tensors[f"branch{j}.{'mapped' if mapped else 'kept'}.v"]) < 1e-4
                at += count
            if mapped:
                found = synthesizer.mapper.coefficients([b["position_span"] for b in case["branches"]])
                for j in range(len(branches)):
                    parts4 = [getattr(found, f"{x}_{y}")[j, :, 0, 0] for x in ("key", "value") for y in ("scale", "shift")]
                    assert relative_error(torch.stack(parts4, -1), tensors[f"branch{j}.coeffs"]) < 1e-5
            params = SamplingParams(max_tokens=case["greedy_max_new_tokens"], return_logits=True, stop_token_ids=stop)
            result = synthesizer.generate(context=context, prompt=u, params=params)
        width = tensors["judger.last_logits.none"].shape[0]
        if parts != "both":
            assert relative_error(result.logits[len(u) - 1, :width], tensors[f"judger.last_logits.{parts}"]) < 1e-4
            continue
        assert relative_error(result.logits[: len(u), :width], tensors["judger.prompt_logits"]) < 1e-4
        tokens = case["greedy_output_ids"]
        assert result.token_ids == (tokens[:-1] if case["greedy_ended_with_eos"] else tokens)
        steps = tensors["judger.decode_logits"]
        assert relative_error(result.logits[len(u) - 1 :][: len(steps), :width], steps) < 1e-4
    assert all(branch.closed for branch in branches) and engine.check() and engine.stats()["used_pages"] == 0


MODES = {"final_output": "final", "each_turn_output": "outputs", "full_prompt_output_no_system": "all", "full_prompt_output": "full"}


@pytest.mark.parametrize("mode", MODES)
def test_memory_modes_equal_the_release(mode):  # without its bug: asking twice gives the same
    case = json.loads((GOLDEN / "memory_modes" / "qwen3_tool_turns.json").read_text())
    tensors = load_file(GOLDEN / "memory_modes" / "qwen3_tool_turns.safetensors")
    engine = golden_engine("tiny-qwen3")
    branches = [engine.fork(engine.prefill(w["system"]), [w["turns"][0]["new_input"]])[0] for w in case["workers"]]
    for branch, worker in zip(branches, case["workers"]):
        for number, turn in enumerate(worker["turns"]):
            if number:
                engine.extend([branch], [turn["new_input"]])
            engine.encode([branch], [turn["output"]])
    synthesizer = Synthesizer(engine, GOLDEN / case["components"], options={"keep_turns": MODES[mode]})
    expected, u = case["modes"][mode], case["judger_prompt_ids"]
    with synthesizer.merge(branches) as context:
        assert context.branch_tokens == [entry["cache_len"] for entry in expected["entries"]]
        assert context.branch.next_position == expected["position_offset"]
        keys, values = cached(engine, context, 0, sum(context.branch_tokens))
        assert relative_error(keys, tensors[f"{mode}.merged.k"]) < 1e-4
        assert relative_error(values, tensors[f"{mode}.merged.v"]) < 1e-4
        for _ in range(2):
            params = SamplingParams(max_tokens=8, return_logits=True)
            result = synthesizer.generate(context=context, prompt=u, params=params)
            assert relative_error(result.logits[: len(u)], tensors[f"{mode}.prompt_logits"]) < 1e-4
            assert result.token_ids == expected["greedy_output_ids"]


def test_weights_and_caches_of_two_synthesizers_do_not_mix():  # FAULTS 78
    case, _, model = load("qwen3_m2_unequal")
    engine = golden_engine(model)
    branches, u = decode_workers(engine, case), case["judger_prompt_ids"]
    params = SamplingParams(max_tokens=1, return_logits=True)
    makers = [lambda parts=parts: Synthesizer(engine, GOLDEN / case["components"], parts=parts) for parts in ("none", "both")]

    def logits(synthesizer):
        return synthesizer.generate_from_caches(branches, u, params, consume=False).logits

    first = [logits(make()) for make in makers]
    again = [logits(make()) for make in makers[::-1]][::-1]
    assert all(torch.equal(one, other) for one, other in zip(first, again)) and relative_error(*first) > 1e-2
    plain = engine.prefill(u).next_logits
    text = makers[1]().generate(text=u, params=params, adapted=True).logits[len(u) - 1]
    assert relative_error(text, plain) > 1e-3  # the same prompt under the adapter's weights is computed, not found
    assert relative_error(makers[1]().generate(text=u, params=params).logits[len(u) - 1], plain) < 1e-5
