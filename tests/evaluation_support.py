"""A tiny random model that reads and writes text (bytes), and small invented tasks, for the tests of the evaluation."""

from __future__ import annotations

from minips.chat import ChatFormat
from minips.engine import Engine
from minips.evaluation.example import Example, Task

from .support import fill_pool, tiny_config, tiny_engine
from .toy_tokenizers import toy_tokenizer


def text_engine(*, positions: int = 4096, max_kv_tokens: int = 20000, **changes) -> Engine:
    config = tiny_config(vocab_size=300, max_position_embeddings=positions, **changes)
    plain, tokenizer = tiny_engine(config, page_size=8, max_kv_tokens=max_kv_tokens), toy_tokenizer("chatml")
    engine = Engine(plain.model, config, tokenizer=tokenizer, chat=ChatFormat("chatml", tokenizer), settings=plain.settings)
    fill_pool(engine, 0.0)
    engine._fingerprint = "invented"  # the weights are the same each time, and lie in no folder
    return engine


def given(name: str, passages: tuple[str, ...] = ("a red bird", "two blue cats here", "one")) -> Example:
    asked = f"What is {name}?"
    return Example(name, asked, f"Read. {asked}", f"{asked} Say it.", ("red",), "red", passages=passages, group=name[0])


def asked(name: str, worker_prompts: tuple[str, ...] = ()) -> Example:
    text = f"What is {name}?"
    return Example(name, text, text, f"{text} Combine.", ("blue",), "blue", worker_prompts=worker_prompts, group=name[0])


def first_letter(text: str, example: Example, rules: str) -> str | None:
    return text[:1] or None


def hit(text: str, example: Example, rules: str) -> dict[str, float]:
    return {"em": float(text.startswith("r")), "f1": len(text) % 2 / 2}


def task_of(examples: list[Example], name: str = "invented", extract=first_letter, score=hit) -> Task:
    return Task(name, "em", lambda folder, workers, seed: list(examples), score, extract, worker_tokens=7, answer_tokens=6)
