"""The published release's synthesis cases (profile official), through the public API: workers' prompts in, logits out."""

import json

import pytest
import torch
from safetensors.torch import load_file

from minips import SamplingParams, Synthesizer
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("page_size", [4, 64])
def test_workers_and_plain_synthesis_equal_the_release(name, page_size):
    case, tensors, model = load(name)
    engine = golden_engine(model, page_size=page_size)
    engine.valid_vocab = len(tensors["judger.last_logits.none"])  # one release cuts the vocabulary of workers and synthesizer
    branches = decode_workers(engine, case)
    for branch, expected in zip(branches, case["branches"]):
        stopped = expected["ended_with_eos"]
        assert branch.output_ids == (expected["output_ids"][:-1] if stopped else expected["output_ids"])
        assert branch.finish_reason == ("stop" if stopped else "length")
    synthesizer = Synthesizer(engine, options={"profile": "official"})
    with synthesizer.merge(branches) as context:
        assert context.branch_tokens == [b["kept_len"] for b in case["branches"]]
        assert context.branch.next_position == case["position_offset"]
        pool, at = engine.pool, 0
        for j, count in enumerate(context.branch_tokens):
            slots = torch.cat([pool.slots(s.pages, s.length) for s in context.branch.segments])[at : at + count]
            keys, values = (torch.stack([t.flatten(0, 1)[slots] for t in x]).transpose(1, 2) for x in (pool.keys, pool.values))
            assert relative_error(keys, tensors[f"branch{j}.shifted.k"]) < 1e-4
            assert relative_error(values, tensors[f"branch{j}.kept.v"]) < 1e-4
            at += count
        u = case["judger_prompt_ids"]
        result = synthesizer.generate(context=context, prompt=u, params=SamplingParams(max_tokens=1, return_logits=True))
        expected = tensors["judger.last_logits.none"]
        assert relative_error(result.logits[len(u) - 1, : len(expected)], expected) < 1e-4
