"""Keeps questions of evaluation sets out of training: every text of an example is searched for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..errors import MinipsError
from ..evaluation.data import held_out
from ..evaluation.tasks import TASKS
from ..training.encoding import Example

TRAINED = ("nq_open", "hotpotqa", "squad", "strategyqa", "kv_retrieval")  # their held-out rows alone are evaluation rows
SHORTEST = 4  # words; a shorter question says nothing
WINDOW = 6  # words by which questions are found; shorter ones by all of theirs


class EvaluationQuestions:
    """Normalised questions, found as whole runs of words inside other texts."""

    def __init__(self, questions: Iterable[str]):
        self._by_start: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for question in questions:
            words = _words(question)
            if len(words) >= SHORTEST:
                self._by_start[words[:WINDOW]].append(words)
        self._lengths = sorted({len(start) for start in self._by_start})

    @classmethod
    def from_folder(cls, folder: Path | None) -> EvaluationQuestions:
        """Of every evaluation task whose data is in the folder (None: the hub)."""
        questions = []
        for name, task in TASKS.items():
            try:
                rows = task.load(folder, 1, 0)
            except MinipsError:
                continue  # not there, so not evaluated here
            questions += [row.question for row in rows if name not in TRAINED or held_out(name, row)]
        return cls(questions)

    def stand_in(self, text: str) -> bool:
        words = _words(text)
        for at in range(len(words)):
            for length in self._lengths:
                for question in self._by_start.get(words[at : at + length], ()):
                    if words[at : at + len(question)] == question:
                        return True
        return False

    def leak(self, example: Example) -> bool:
        """Whether one of the questions stands in any of the example's texts."""
        return any(
            self.stand_in(text) for text in (example.prompt, example.prefix, example.target, *example.branches) if isinstance(text, str)
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))
