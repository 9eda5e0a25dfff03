"""What a task is made of: its rows as `Example`, and how an answer to one is judged. Every other file here builds on this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

RULES = ("minips", "official")  # scoring: ours, or the release's with its known weaknesses


@dataclass(frozen=True)
class Example:
    """One row of a task, ready for every method.

    id: unique within the task and stable between runs. question: what is asked, for reports. prefix: T of the shared prefix
    c_sh (user turn left open). prompt: U of the synthesizer; it restates the question. references: the accepted answers.
    target: the text whose log-likelihood as the answer is measured. system: system text of all (None: the model's own).

    Branches are either decoded or given. worker_prompts: what each worker is told besides the prefix; () means the same for
    all, as many as the run asks for. passages: given branches (documents, facts), encoded instead of decoded; their number is
    the row's m. group: sub-task kind for the failure analysis. meta: what scoring needs (tests, options, tolerance ...);
    `family`: what rows share that must not be split between training and evaluation (the article of a question; "": all rows).
    """

    id: str
    question: str
    prefix: str
    prompt: str
    references: tuple[str, ...]
    target: str
    worker_prompts: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()
    system: str | None = None
    group: str = ""
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A named set of examples and its rules.

    load(folder, workers, seed): examples from `folder` (the data directory; None: the hub), in the file's order, passages dealt over `workers`
    branches where the task has any; raises MinipsError naming the file that is missing and how to get it.
    score(text, example, rules): metrics of an answer, each 0 to 1; the first one is the task's own, `metric`.
    extract(text, example, rules): the answer in its canonical form, for reports and majority votes; None where there is none.
    answer_tokens, worker_tokens: how long an answer and a worker's output may be by default. agents: workers use tools (`agents.py`).
    """

    name: str
    metric: str
    load: Callable[[Path | None, int, int], list[Example]]
    score: Callable[[str, Example, str], dict[str, float]]
    extract: Callable[[str, Example, str], str | None]
    workers: int = 4
    worker_tokens: int = 512
    answer_tokens: int = 512
    agents: bool = False
    runs_code: bool = False  # scoring runs model-written code in the sandbox
    source: str = ""  # where the data comes from, its licence, and how to get it
