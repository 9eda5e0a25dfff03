"""Does the merged cache say what the plain sequence says? Per position, KL and top-1 agreement between the two.

The synthesizer reads merged branches; beside it, `c_sh + z_1 + ... + z_m + u` is computed anew as one sequence with the same
weights (base for the branches, the synthesizer's for u). With one branch the two must be equal: once where it stands, and once with
the whole sequence made at an offset and re-rotated back. A third case re-rotates with wrong frequencies and must be told
apart, or the check could not see. Several branches cannot be equal, for none has read the others: there the figures say how far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..answering import answer_batch, prompt_logits
from ..chat import default_prompt
from ..config import RopeConfig, SamplingParams
from ..engine import Engine
from ..errors import MinipsError
from ..kv_cache import Branch
from ..model import Model
from ..rope import Rope
from ..synthesis import Synthesizer
from .rows import seed_of

QUESTIONS = (
    "What should a city do first against heat?",
    "Why do leaves change color in autumn?",
    "How can a small shop keep its customers?",
    "What makes bread rise, and what can go wrong?",
    "Is it better to learn two languages at once or one after the other?",
    "How does a bicycle stay upright?",
    "What should a traveler pack for a week in the mountains?",
    "Why did people begin to build bridges of stone?",
)
IDENTITY_MARK = 1e-6  # mean KL in nats, fp32
SEVERAL_MARK = 1.0  # mean KL in nats with several untrained branches; wrong frequencies give more
OFFSET = 1000  # positions by which the moved case is moved, where the model's limit allows
WORKER_TOKENS, ANSWER_TOKENS = 48, 24


@dataclass
class Case:
    """One line of the check. KL in nats a position, of the merged context against the plain sequence; top1: share of equal argmax.

    bound: the mean KL must be below the mark (at most), or above it (at least, for the control).
    """

    name: str
    m: int
    rows: int
    positions: int
    kl_mean: float
    kl_max: float
    top1: float
    mark: float
    bound: str = "at most"

    @property
    def passed(self) -> bool:
        return (self.kl_mean <= self.mark) == (self.bound == "at most")


def self_check(
    engine: Engine, adapter: str | None = None, *, rows: int = 4, workers: Sequence[int] = (2, 4, 8), seed: int = 0
) -> list[Case]:
    """All cases. In fp32 the identity's mark is 1e-6; in 16 bits it is only reported against 1e-2. Without an adapter's mapper."""
    if not 1 <= rows <= len(QUESTIONS):
        raise MinipsError(f"rows is {rows}, expected 1 to {len(QUESTIONS)}")
    base = Synthesizer(engine)
    mark = IDENTITY_MARK if engine.dtype == torch.float32 else 1e-2
    questions = QUESTIONS[:rows]
    broken = Synthesizer(engine, options={"keep_prefix": False, "anchor": "zero"})
    moved = Synthesizer(engine, options={"keep_prefix": False, "anchor": "zero"})
    broken.rope = Rope(wrong_frequencies(engine.config.rope), engine.config.head_dim, engine.device)
    cases = [
        _case("one branch, in place", 1, [_in_place(engine, base, q) for q in questions], mark),
        _case("one branch, re-rotated", 1, [_moved(engine, moved, q) for q in questions], mark),
        replace(_case("control: wrong frequencies", 1, [_moved(engine, broken, q) for q in questions], mark), bound="at least"),
    ]
    synthesizer = Synthesizer(engine, adapter)
    for m in workers:
        found = [_several(engine, synthesizer, q, m, seed) for q in questions]
        cases.append(_case(f"{m} branches", m, found, SEVERAL_MARK))
    return cases


def wrong_frequencies(rope: RopeConfig) -> RopeConfig:
    """The model's frequencies without their scaling; where there is none, of another base."""
    return RopeConfig(theta=rope.theta) if rope.type != "default" else replace(rope, theta=rope.theta / 10)


def compare(merged: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, vocab] of both -> KL(plain || merged) in nats [n], whether the argmax is equal [n]."""
    p, q = plain.double().log_softmax(-1), merged.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0), p.argmax(-1) == q.argmax(-1)


def _case(name: str, m: int, found: Sequence[tuple[Tensor, Tensor]], mark: float) -> Case:
    kl, same = torch.cat([kl for kl, _ in found]), torch.cat([same for _, same in found])
    return Case(name, m, len(found), len(kl), float(kl.mean()), float(kl.max()), float(same.double().mean()), mark)


def _in_place(engine: Engine, synthesizer: Synthesizer, question: str) -> tuple[Tensor, Tensor]:
    """A worker without a context of its own: the root itself is decoded."""
    with engine.prefill(engine.prompts.encode(question, "full")) as root:
        engine.decode([root], SamplingParams(max_tokens=WORKER_TOKENS))
        return _against_plain(synthesizer, [root], root.token_ids, question)


def _moved(engine: Engine, synthesizer: Synthesizer, question: str) -> tuple[Tensor, Tensor]:
    """The whole sequence made `OFFSET` positions further on, then re-rotated to position 0."""
    ids = engine.prompts.encode(question, "full")
    root = engine.empty_branch()
    with root:
        root.next_position = min(OFFSET, engine.config.max_position_embeddings // 2)
        engine.encode([root], [ids])
        return _against_plain(synthesizer, [root], ids, question)


def _several(engine: Engine, synthesizer: Synthesizer, question: str, m: int, seed: int) -> tuple[Tensor, Tensor]:
    branches: list[Branch] = []
    with engine.prefill(question) as prefix:
        try:
            branches = engine.fork(prefix, [""] * m)
            each = [
                SamplingParams(max_tokens=WORKER_TOKENS, temperature=0.7, top_p=0.95, seed=seed_of(seed, question, at)) for at in range(m)
            ]
            engine.decode(branches, each)
            kept = prefix.token_ids if synthesizer.options.keep_prefix else []
            joined = [*kept, *(token for branch in branches for token in branch.output_ids)]
            return _against_plain(synthesizer, branches, joined, question)
        finally:
            for branch in branches:
                branch.close()


def _against_plain(synthesizer: Synthesizer, branches: list[Branch], joined: list[int], question: str) -> tuple[Tensor, Tensor]:
    """Compare at every position of u and of the answer that the plain sequence gives."""
    engine, model = synthesizer.engine, synthesizer.model
    u = engine.prompts.encode(default_prompt(question), "continuation")
    with engine.empty_branch() as plain, synthesizer.merge(branches, consume=False) as context:
        engine.append([plain], [joined])
        params = SamplingParams(max_tokens=ANSWER_TOKENS)
        answer = answer_batch(engine, [plain.child()], [u], params, model, 0.0, synthesizer.valid_vocab)[0].token_ids
        return compare(_logits(context.branch, [*u, *answer], model), _logits(plain, [*u, *answer], model))


def _logits(branch: Branch, ids: list[int], model: Model) -> Tensor:
    """fp32 [len(ids), vocab] behind a branch, which stays as it is."""
    with branch.child() as child:
        return torch.cat(prompt_logits(branch.owner, [child], [ids], [True], model)[0])
