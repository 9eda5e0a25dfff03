"""Runs tasks and methods over rows in batches and writes each finished row to the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..config import SamplingParams
from ..engine import Engine
from ..errors import MinipsError, RoomError
from ..reading import is_integer
from ..results import Result
from .agents import prepare
from .data import held_out
from .example import RULES, Example, Task
from .methods import Scorer, Setup, adapter_of, check_method, run_method
from .records import PREDS, Records, open_records
from .rows import Row, open_rows
from .tasks import TASKS, select, task

MOST_WORKERS = 256


@dataclass(frozen=True)
class Plan:
    """What to evaluate. workers: the values of m (one entry: no sweep). rows: how many of each task (None: all), drawn with seed. held_out:
    only rows that no training of ours has seen (`data.held_out`).

    data: the data folder (None: the hub). answer_tokens and worker_tokens: None takes the task's own. temperature and top_p: of the workers;
    the answer is greedy. batch: examples at a time; it changes the speed (and, in bf16, near-ties). scoring: minips or official.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    data: str | None
    model: str
    adapter: str | None = None
    workers: tuple[int, ...] = (4,)
    rows: int | None = None
    held_out: bool = False
    seed: int = 0
    temperature: float = 0.7
    top_p: float = 0.95
    worker_tokens: int | None = None
    answer_tokens: int | None = None
    scoring: str = "minips"
    batch: int = 8

    def check(self) -> None:
        """Refuse what cannot be run, before anything is loaded."""
        for name in self.tasks:
            task(name)
        for spec in self.methods:
            check_method(spec)
        for what, values in (("task", self.tasks), ("method", self.methods), ("workers", self.workers)):
            if not values or len(set(values)) < len(values):
                raise MinipsError(f"{what} is {', '.join(map(str, values)) or 'empty'}, expected at least one, each once")
        lengths = (("worker tokens", self.worker_tokens), ("answer tokens", self.answer_tokens))
        for what, value in (("rows", self.rows), ("batch", self.batch), *lengths, *(("workers", m) for m in self.workers)):
            if value is not None and not (is_integer(value) and value >= 1):
                raise MinipsError(f"{what} is {value}, expected at least 1")
        if max(self.workers) > MOST_WORKERS:
            raise MinipsError(f"workers is {max(self.workers)}, expected at most {MOST_WORKERS}")
        if self.scoring not in RULES:
            raise MinipsError(f"scoring is {self.scoring!r}, expected one of {', '.join(RULES)}")
        self.worker_params(TASKS[self.tasks[0]])
        self.answer_params(TASKS[self.tasks[0]])

    def worker_params(self, task: Task) -> SamplingParams:
        return SamplingParams(max_tokens=self.worker_tokens or task.worker_tokens, temperature=self.temperature, top_p=self.top_p)

    def answer_params(self, task: Task) -> SamplingParams:
        return SamplingParams(max_tokens=self.answer_tokens or task.answer_tokens)

    def arguments(self) -> dict:
        """What must be the same for a run to be resumed; more rows extend it, for a larger sample holds the smaller one."""
        arguments = {name: value for name, value in asdict(self).items() if name not in ("data", "rows", "batch")}
        return {name: value for name, value in arguments.items() if name != "held_out" or value}  # as runs were before it


def evaluate(
    plan: Plan,
    folder: str | Path,
    engine: Engine | Callable[[], Engine] | None = None,
    *,
    scorer: Scorer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """Run a plan, or go on with it, in `folder`; returns all rows (`records`).

    engine: one, what makes one (called when the data has been read), or None for plan.model. scorer: chooses the answer of best_of_n.
    say: hears one line of progress a batch. A row that does not fit the model's positions or the page pool is kept with its error and
    counts as wrong; anything else that is wrong ends the run, which the same call resumes.
    """
    plan.check()
    loaded = {(name, m): load_examples(plan, name, m) for name in plan.tasks for m in plan.workers}
    for (name, m), examples in loaded.items():
        if task(name).agents:
            prepare(examples[0], m)  # refuses tools that are not to be had
    engine = engine() if callable(engine) else engine or Engine.from_pretrained(plan.model, progress=True)
    shared: dict = {}
    setups = {
        name: Setup(engine, task(name), plan.answer_params(task(name)), plan.scoring, plan.adapter, scorer, shared) for name in plan.tasks
    }
    for spec in plan.methods:  # refuses adapters that are not to be had
        setups[plan.tasks[0]].synthesizer(adapter_of(spec, setups[plan.tasks[0]]))
    with open_records(folder, plan.arguments()) as records:
        for (name, m), examples in loaded.items():
            _examples_of(records.rows(), examples, name, m)
            left = [example for example in examples if (name, example.id, m) not in records.done]
            say(f"{name}, m = {m}: {len(examples)} rows, {len(examples) - len(left)} done before")
            setup = setups[name]
            started = time.perf_counter()
            for first in range(0, len(left), plan.batch):
                _run_batch(plan, setup, left[first : first + plan.batch], m, records)
                done = min(first + plan.batch, len(left))
                seconds = time.perf_counter() - started
                say(f"{name}, m = {m}: {done} of {len(left)}, {seconds:.0f} s, {seconds / done * (len(left) - done):.0f} s left")
        return records.rows()


def judge_again(plan: Plan, folder: str | Path) -> int:
    """Score the answers of a run anew, after a change of the rules; the answers, also those that best_of_n chose, stay.

    Returns the number of rows. MinipsError where there are none, or where the data holds others.
    """
    plan.check()
    if not (Path(folder) / PREDS).exists():
        raise MinipsError(f"{folder}: has no {PREDS}, so there is nothing to judge")
    with open_records(folder, plan.arguments()) as records:
        rows = records.rows()
        for name in plan.tasks:
            for m in plan.workers:
                for row, example in _examples_of(rows, load_examples(replace(plan, rows=None), name, m), name, m, every=True):
                    for method in row["methods"].values():
                        method.update(_verdict(task(name), example, method["text"], plan.scoring))
                    for worker in row["workers"] if not example.passages else ():
                        worker["extracted"] = task(name).extract(worker["text"], example, plan.scoring)
        records.replace(rows)
        return len(rows)


def _examples_of(rows: Sequence[dict], examples: Sequence[Example], name: str, m: int, every: bool = False) -> list[tuple[dict, Example]]:
    """The recorded rows of a task and m, each with its example; refuses rows of other data (every: also rows without an example)."""
    known, pairs = {example.id: example for example in examples}, []
    for row in rows:
        if (row["task"], row["m"]) == (name, m) and (every or row["id"] in known):
            example = known.get(row["id"])
            if example is None or row.get("question") != example.question:
                raise MinipsError(f"{name}, row {row['id']}: this run was made of other data, whose row of this name asks something else")
            pairs.append((row, example))
    return pairs


def load_examples(plan: Plan, name: str, m: int) -> list[Example]:
    """The plan's rows of one task, with the passages (where it has any) dealt over m branches."""
    examples = task(name).load(Path(plan.data) if plan.data else None, m, plan.seed)
    if plan.held_out:
        examples = [example for example in examples if held_out(name, example)]
    return select(examples, plan.rows, plan.seed)


def _run_batch(plan: Plan, setup: Setup, examples: Sequence[Example], m: int, records: Records) -> None:
    """One batch; where it is refused (too little room), its examples alone."""
    try:
        found = _answers(plan, setup, examples, m)
    except RoomError as error:
        if len(examples) > 1:
            for example in examples:
                _run_batch(plan, setup, [example], m, records)
            return
        records.append(_failed(plan, setup.task, examples[0], m, str(error)))
        return
    for row in found:
        records.append(row)


def _answers(plan: Plan, setup: Setup, examples: Sequence[Example], m: int) -> list[dict]:
    """Workers once, then every method on their branches -> one record an example."""
    task = setup.task
    rows = open_rows(setup.engine, task, examples, m, plan.worker_params(task), plan.seed)
    try:
        methods: list[dict[str, dict]] = [{} for _ in rows]
        for spec in plan.methods:
            started = time.perf_counter()
            results = run_method(spec, setup, rows)
            seconds = (time.perf_counter() - started) / len(rows)
            for at, (row, result) in enumerate(zip(rows, results)):
                methods[at][spec] = _judged(setup, row.example, result, seconds)
        return [_record(setup, row, m, found) for row, found in zip(rows, methods)]
    finally:
        for row in rows:
            row.close()


def _judged(setup: Setup, example: Example, result: Result, seconds: float) -> dict:
    """One method's part of a record."""
    scores = result.scores
    return {
        "text": result.text,
        **_verdict(setup.task, example, result.text, setup.rules),
        "nll": scores.mean_nll if scores is not None else None,
        "target_tokens": len(scores.token_ids) if scores is not None else 0,
        "answer_tokens": len(result.token_ids),
        "finish_reason": result.finish_reason,
        "prefilled_tokens": result.prefilled_tokens,
        "reused_tokens": result.reused_tokens,
        "branch_tokens": list(result.branch_tokens),
        "seconds": round(seconds, 4),
    }


def _verdict(task: Task, example: Example, text: str, rules: str) -> dict:
    return {"extracted": task.extract(text, example, rules), "scores": task.score(text, example, rules)}


def _record(setup: Setup, row: Row, m: int, methods: dict[str, dict]) -> dict:
    example, lengths = row.example, [len(branch.output_ids) for branch in row.branches]
    workers = [
        {
            "text": text,
            "tokens": length,
            "finish_reason": branch.finish_reason,
            "extracted": None if example.passages else setup.task.extract(text, example, setup.rules),
        }
        for text, length, branch in zip(row.texts, lengths, row.branches)
    ]
    for method in methods.values():  # text methods read the same branches
        method["branch_tokens"] = method["branch_tokens"] or lengths
    seconds = {"workers": round(row.seconds, 4), "methods": round(sum(method["seconds"] for method in methods.values()), 4)}
    return _head(setup.task, example, m) | {"workers": workers, "methods": methods, "seconds": seconds}


def _head(task: Task, example: Example, m: int) -> dict:
    return {
        "task": task.name,
        "id": example.id,
        "m": m,
        "question": example.question,
        "group": example.group,
        "references": list(example.references),
    }


def _failed(plan: Plan, task: Task, example: Example, m: int, error: str) -> dict:
    """A row that could not be run: every method answered nothing, and counts as wrong."""
    empty = {
        "text": "",
        **_verdict(task, example, "", plan.scoring),
        "nll": None,
        "target_tokens": 0,
        "answer_tokens": 0,
        "finish_reason": "error",
        "prefilled_tokens": 0,
        "reused_tokens": 0,
        "branch_tokens": [],
        "seconds": 0.0,
    }
    methods = {spec: dict(empty) for spec in plan.methods}
    return _head(task, example, m) | {"workers": [], "methods": methods, "seconds": {"workers": 0.0, "methods": 0.0}, "error": error}
