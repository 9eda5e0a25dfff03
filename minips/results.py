"""What calls return, and whose turn it is to compute: one thread at a time, undisturbed by signals, a stream step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from .errors import MinipsError
from .turns import Turns, memory_errors

TIMING_KEYS = ("rerotate", "map", "prefill", "first_token", "decode")


@dataclass
class Result:
    """A generated answer.

    finish_reason: stop or length. ttft: seconds from the call (tokenization, re-rotation, mapping and the prompt's prefill
    included) to the first token id on the host. timings: seconds by part. logprobs: per token {id: log-probability}.
    logits: fp32 [prompt + generated, vocab], row i predicts token i + 1. prefilled_tokens were computed for this answer,
    reused_tokens were read from the cache. seed: the one in force. workers: what each worker wrote (`Synthesizer.run`).
    scores: those of a given target in the answer's place, where one was given (`generate_batch`).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    ttft: float
    timings: dict[str, float]
    num_branches: int = 0
    branch_tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: object | None = None
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    seed: int | None = None
    workers: list[WorkerOutput] = field(default_factory=list)
    scores: Scores | None = None


@dataclass
class WorkerOutput:
    """What one worker wrote, kept after its branch is consumed."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int

    @classmethod
    def of(cls, branch) -> WorkerOutput:
        """Of a branch that has just been decoded."""
        return cls(branch.text, list(branch.output_ids), branch.finish_reason, branch.num_tokens - len(branch.output_ids))


@dataclass
class Scores:
    """Log-probabilities of a given target: logprobs[i] is that of token_ids[i], natural log; greedy[i]: it was the likeliest."""

    token_ids: list[int]
    logprobs: list[float]
    greedy: list[bool]

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood in nats a token."""
        return -sum(self.logprobs) / len(self.logprobs)


class TextStream:
    """Iterator of text pieces; `.result` holds the Result once it is exhausted. `close` (or leaving `with`) ends it early.

    With `turns` each token is computed in a turn of its own, so that other threads compute in between. A step that fails or is
    interrupted ends the stream.
    """

    def __init__(self, generator, turns: Turns | None = None, what: str = "stream"):
        self._generator, self._result = generator, None
        self._turn = nullcontext if turns is None else partial(turns, what)
        self._turns, self._what = turns, what

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            piece = ""
            while not piece:  # a token without text of its own is a step too
                with self._turn(), memory_errors(self._what):
                    piece = next(self._generator)
            return piece
        except StopIteration as stop:
            if stop.value is not None:
                self._result = stop.value
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    @property
    def result(self) -> Result:
        if self._result is None:
            raise MinipsError("TextStream: result asked for before the stream was read to its end")
        return self._result

    def finish(self) -> Result:
        """Read to the end and return the Result."""
        with self:
            for _ in self:
                pass
        return self.result

    def close(self) -> None:
        with nullcontext() if self._turns is None or self._turns.elsewhere else self._turn():
            if self._generator.gi_running:  # called by the handler of a signal that came within a step
                raise MinipsError(f"{self._what}: cannot be closed within its own step; raise an exception in the handler to stop it")
            self._generator.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._generator.gi_frame is not None:
            self.close()
