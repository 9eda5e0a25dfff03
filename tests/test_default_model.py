"""The embedded default model: what its conversion must give."""

from __future__ import annotations

import pytest
import torch

from minips import Engine, SamplingParams, Synthesizer
from minips.config import ModelConfig
from minips.tokenizer import Tokenizer
from minips.weights import fingerprint, load_weights

TEXTS = (
    "def area(r):\n\treturn 3.14159 * r ** 2  # 12345 and 007\n",
    "It's what they'll say: we've 1,000,000 reasons, don't we?",
    "emoji 😀👩‍👩‍👧 and flags 🇫🇷",
    "你好，世界。こんにちは 안녕하세요",
    "  two,   three,\t\ttabs,\n\n\n  \r\n and a tail   ",
    "naïve café, a\u0301 with a combining accent, no-break\u00a0blank",
    "<html><body class='x'>{\"a\": [1, 2.5e-3]}</body></html>",
    "",
)


def test_config(default_model):
    config = ModelConfig.from_folder(default_model)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.tie_word_embeddings and config.rope.theta == 100000.0 and config.rope.type == "default"
    assert config.dtype == "bfloat16" and config.eos_token_ids == (2,) and not config.attention_bias


def test_weights_load_and_have_a_stable_fingerprint(default_model):
    config = ModelConfig.from_folder(default_model)
    tensors = load_weights(default_model, config, dtype=torch.bfloat16)
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert fingerprint(default_model, config) == "c03a8e055410f09d35f04857eb72b8a8"


def test_end_tokens(default_model):  # FAULTS 20
    tokenizer = Tokenizer.from_folder(default_model, ModelConfig.from_folder(default_model))
    assert tokenizer.eos_token_ids[0] == 2 and set(tokenizer.eos_token_ids) == {2, 0}
    assert (tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")) == (1, 2)
    assert tokenizer.bos_token_id is None and tokenizer.vocab_size == 49152


def test_tokenizer_agrees_with_transformers(default_model):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(default_model, local_files_only=True)
    tokenizer = Tokenizer.from_folder(default_model, ModelConfig.from_folder(default_model))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle(text).input_ids, text
        assert tokenizer.decode(ids) == text
    message = [{"role": "user", "content": "Who are you?"}]
    rendered = oracle.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_digits_stand_alone(default_model):
    tokenizer = Tokenizer.from_folder(default_model, ModelConfig.from_folder(default_model))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("x2024 98")] == ["x", "2", "0", "2", "4", " ", "9", "8"]


PROMPTS = (
    "Explain photosynthesis to a child.", "Write a haiku about rain.", "What is 17 times 23?", "List three uses of copper.", "def fib(n):",
    "Translate 'good morning' to French.", "Why is the sky blue?", "Name five European capitals.",
    "Summarise the plot of Hamlet in two sentences.", "How do I boil an egg?",
)  # fmt: skip


def test_greedy_continuations_equal_transformers_in_fp32(default_model):
    transformers = pytest.importorskip("transformers")
    engine = Engine.from_pretrained(default_model, dtype="float32")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    branches = [engine.prefill(engine.prompts.encode(prompt, "full")) for prompt in PROMPTS]
    prompts = [list(branch.token_ids) for branch in branches]
    engine.decode(branches, params)  # one ragged batch
    for prompt, branch in zip(prompts, branches):
        ids = torch.tensor([prompt])
        expected = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=[49151], pad_token_id=49151
        )
        assert branch.output_ids == expected[0, len(prompt) :].tolist()


def test_a_whole_run_answers_on_the_default_model(default_model):
    engine = Engine.from_pretrained(default_model)
    synthesizer = Synthesizer(engine)
    task = "Name three ways to keep a house cool in summer."
    prompts = ["Think of plants.", "Think of windows.", "Think of the roof.", "Think of fans."]
    result = synthesizer.run(task, prompts, worker_params=SamplingParams(max_tokens=48), params=SamplingParams(max_tokens=48))
    assert result.num_branches == 4 and len(result.workers) == 4 and all(worker.text for worker in result.workers)
    assert len(result.text.split()) > 10 and "\ufffd" not in result.text
    assert result.prefilled_tokens < 60 and result.reused_tokens > 100
    assert engine.stats()["used_pages"] == 0 and engine.check()
    again = synthesizer.run(task, prompts, worker_params=SamplingParams(max_tokens=48), params=SamplingParams(max_tokens=48))
    assert again.token_ids == result.token_ids


def test_one_branch_identity_on_the_default_model(default_model):
    engine = Engine.from_pretrained(default_model, dtype="float32")
    prefix = engine.prefill(engine.prompts.encode("Why is the sky blue?", "full"))
    branch = engine.decode(engine.fork(prefix, [[]]), SamplingParams(max_tokens=20))[0]
    u = engine.prompts.encode("Say it in one sentence.", "continuation")
    plain = engine.generate([*branch.token_ids, *u], SamplingParams(max_tokens=24))
    merged = Synthesizer(engine).generate_from_caches([branch], "Say it in one sentence.", SamplingParams(max_tokens=24))
    assert merged.token_ids == plain.token_ids and merged.text == plain.text
