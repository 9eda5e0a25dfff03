"""Workflows: a run as one JSON object, read, checked and completed. No torch here.

`read_workflow` gives the object of a file or of a packaged example; `complete` checks it and fills in every default and
every seed, so that the completed object runs the same way again; `workers_of` lists what each worker does. The fields are
described in `minips/examples/workflow.schema.json`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, fields
from pathlib import Path

from .chat import default_prompt
from .config import DEFAULT_MODEL, MergeOptions, SamplingParams
from .errors import MinipsError, brief, guess
from .shipped import shipped_adapter
from .workflow_checks import (
    ENGINE_FIELDS,
    ENGINE_SIZES,
    MAX_WORKERS,
    SAMPLING_FIELDS,
    Prompt,
    check_branch,
    check_engine,
    check_merge,
    check_object,
    check_prompt,
    check_sampling,
    check_text,
    fail,
    shown,
)

METHODS = ("parallel", "text", "summary", "reuse", "naive", "best-of-n")
TEXT_METHODS = ("text", "summary")  # these read the workers' words, so they need prompts that are words
FORCED_MERGE = {"reuse": {"layout": "sequential"}, "naive": {"rerotate": False}}
EXAMPLES = Path(__file__).parent / "examples"
MAX_BYTES = 64 << 20

_BASE = {field.name: field.default for field in fields(SamplingParams) if field.name in SAMPLING_FIELDS}
WORKER_SAMPLING = {**_BASE, "temperature": 0.7, "top_p": 0.95, "seed": 0}
ANSWER_SAMPLING = {**_BASE, "repetition_penalty": 1.05, "seed": 0}  # small models loop in long greedy answers; a light touch is enough
ENGINE_DEFAULTS = {name: None if name in ENGINE_SIZES else "auto" for name in ENGINE_FIELDS} | {"quantize": "none", "compile": False}
TOP_FIELDS = (
    *("$schema", "name", "description", "model", "engine", "method", "system", "prefix"),
    *("sampling", "branches", "load_branches", "synthesizer"),
)
SYNTHESIZER_FIELDS = ("prompt", "sampling", "adapter", "merge")


@dataclass(frozen=True)
class Turn:
    """One turn of a worker: what it is told (`prompt`) and what it then decodes (`params`) or is given (`output`)."""

    prompt: Prompt
    params: SamplingParams
    output: str | list[int] | None = None


@dataclass(frozen=True)
class Worker:
    """One worker: a label for people, and its turns."""

    label: str
    turns: tuple[Turn, ...]


# Reading


def example_names() -> list[str]:
    """Names of the packaged examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.json") if not path.name.endswith(".schema.json"))


def read_workflow(name: str) -> tuple[dict, str]:
    """The raw object of a packaged example or of a file, and the name that error messages give it.

    What `--json` printed is taken too: its field `workflow` is the workflow.
    """
    if name in example_names():
        return _parse((EXAMPLES / f"{name}.json").read_bytes(), name), name
    try:
        with open(Path(name).expanduser(), "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        known = example_names()
        hint = guess(name, known)
        raise MinipsError(f"--workflow {brief(name)}: no such file, and no packaged example; {hint}packaged: {', '.join(known)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MinipsError(f"--workflow {brief(name)}: cannot be read ({reason}), expected a JSON file or a packaged example") from None
    if len(content) > MAX_BYTES:
        raise MinipsError(f"{name}: is larger than {MAX_BYTES >> 20} MiB, expected a workflow")
    data, where = _parse(content, name), name
    if isinstance(data.get("workflow"), dict) and "prefix" not in data:
        data, where = data["workflow"], f"{name}: workflow"
    return data, where


def _parse(content: bytes, name: str) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            double = next(key for key in names if names.count(key) > 1)
            raise MinipsError(f"{name}: the field {brief(double)} stands twice in one object")
        return found

    def no_constant(constant: str) -> None:
        raise MinipsError(f"{name}: holds {constant}, which is no JSON number")

    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        data = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise MinipsError(f"{name}: is no UTF-8 text (byte {error.start}), expected a JSON object") from None
    except MinipsError:
        raise
    except RecursionError:
        raise MinipsError(f"{name}: is nested too deeply, expected a workflow") from None
    except ValueError as error:  # a number with thousands of digits is one too
        raise MinipsError(f"{name}: is not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise MinipsError(f"{name}: is {shown(data)}, expected an object with at least prefix and branches")
    return data


# Completing


def complete(data: dict, where: str = "workflow") -> dict:
    """Check a raw workflow and fill in all defaults and seeds. MinipsError with the path of the first mistake."""
    check_object(data, where, TOP_FIELDS)
    at = f"{where}: " if not where.endswith(": workflow") else f"{where}."
    for name in ("$schema", "name", "description"):
        check_text(data.get(name, ""), f"{at}{name}")
    model = check_text(data.get("model", DEFAULT_MODEL), f"{at}model", empty=False)
    engine = {**ENGINE_DEFAULTS, **check_engine(data.get("engine", {}), f"{at}engine")}
    method = data.get("method", "parallel")
    if method not in METHODS:
        fail(f"{at}method", method, f"one of {', '.join(METHODS)}")
    system = data.get("system")
    if system is not None:
        check_text(system, f"{at}system")
    kept = {name: data[name] for name in ("$schema", "name", "description") if name in data}
    if "load_branches" in data:
        return _with_seeds({**kept, "model": model, "engine": engine, "method": method, **_complete_loaded(data, at, method)})
    if "prefix" not in data:
        raise MinipsError(f"{at}prefix is missing, expected what all workers read: text or messages")
    prefix = check_prompt(data["prefix"], f"{at}prefix", first=True, empty=False)
    messages = isinstance(prefix, list) and isinstance(prefix[0], dict)
    if system is not None and (messages and prefix[0]["role"] == "system" or isinstance(prefix, list) and not messages):
        raise MinipsError(f"{at}system is given, but the prefix is token ids or brings its own system message; expected one of the two")
    sampling = {**WORKER_SAMPLING, **check_sampling(data.get("sampling", {}), f"{at}sampling")}
    branches = data.get("branches", [{}])
    if not isinstance(branches, list) or not branches:
        fail(f"{at}branches", branches, "a list of at least one branch")
    count = sum(check_branch(branch, f"{at}branches[{index}]") for index, branch in enumerate(branches))
    if count > MAX_WORKERS:
        raise MinipsError(f"{at}branches stand for {count} workers, expected at most {MAX_WORKERS}")
    synthesizer = _complete_synthesizer(data.get("synthesizer", {}), at, model, method, prefix)
    if method in TEXT_METHODS and not (isinstance(synthesizer["prompt"], str) and (messages or isinstance(prefix, str))):
        raise MinipsError(f"{at}method {method} needs a synthesizer.prompt of text and a prefix of text or messages")
    given = [f"{at}branches[{i}]" for i, branch in enumerate(branches) if "output" in branch.get("turns", [branch])[-1]]
    if method == "best-of-n" and given:
        raise MinipsError(f"{given[0]} has a given output, but method best-of-n votes over what workers decode")
    body = {"model": model, "engine": engine, "method": method, "system": system, "prefix": prefix, "sampling": sampling}
    return _with_seeds({**kept, **body, "branches": branches, "synthesizer": synthesizer})


def _complete_loaded(data: dict, at: str, method: str) -> dict:
    """The rest of a workflow whose branches come from a folder: they bring all that workers need."""
    folder = check_text(data["load_branches"], f"{at}load_branches", empty=False)
    for name in ("prefix", "branches", "sampling", "system"):
        if name in data:
            raise MinipsError(f"{at}load_branches and {name} cannot be combined: saved branches are read, no workers run")
    if method in (*TEXT_METHODS, "best-of-n"):
        fail(f"{at}method", method, "parallel, reuse or naive, because load_branches brings caches, not what workers write")
    synthesizer = _complete_synthesizer(data.get("synthesizer", {}), at, data.get("model", DEFAULT_MODEL), method, [])
    return {"load_branches": folder, "synthesizer": synthesizer}


def _complete_synthesizer(value: object, at: str, model: str, method: str, prefix: Prompt) -> dict:
    where = f"{at}synthesizer"
    check_object(value, where, SYNTHESIZER_FIELDS)
    prompt = value.get("prompt")
    if prompt is not None:
        check_prompt(prompt, f"{where}.prompt")
    else:
        asked = [prefix] if isinstance(prefix, str) else [m["content"] for m in prefix if isinstance(m, dict) and m["role"] == "user"]
        if not asked:
            raise MinipsError(f"{where}.prompt is missing; the default restates a prefix that is text or has a user message")
        prompt = default_prompt(asked[-1])
    adapter = value.get("adapter")
    if adapter is not None:
        check_text(adapter, f"{where}.adapter", empty=False)
        if method != "parallel":
            raise MinipsError(f"{where}.adapter is given, but method {method} uses none; expected method parallel")
    merge = dict(check_merge(value.get("merge", {}), f"{where}.merge"))
    for name, forced in FORCED_MERGE.get(method, {}).items():
        if merge.get(name, forced) != forced:
            fail(f"{where}.merge.{name}", merge[name], f"{shown(forced)}, which is what method {method} means")
    if adapter is None:  # an adapter brings options of its own; the shipped one has the defaults
        try:
            MergeOptions().changed(merge)
        except MinipsError as error:
            raise MinipsError(f"{where}.merge: {str(error).removeprefix('MergeOptions: ')}") from None
    sampling = {**ANSWER_SAMPLING, **check_sampling(value.get("sampling", {}), f"{where}.sampling")}
    if "adapter" not in value and method == "parallel":
        adapter = shipped_adapter(model)
    return {"prompt": prompt, "sampling": sampling, "adapter": adapter, "merge": merge}


def _with_seeds(data: dict) -> dict:
    """A copy in JSON's own types in which each seed that was left to chance (null) is drawn."""
    data = json.loads(json.dumps(data))
    branches = data.get("branches", [])
    samplings = [data.get("sampling", {}), data["synthesizer"]["sampling"]]
    samplings += [part["sampling"] for branch in branches for part in (branch, *branch.get("turns", ())) if "sampling" in part]
    for sampling in samplings:
        if sampling.get("seed", 0) is None:
            sampling["seed"] = secrets.randbits(31)
    return data


def workers_of(data: dict) -> list[Worker]:
    """What each worker of a completed workflow does, in order; none where branches are loaded. Seeds of decoded rows stand here."""
    workers: list[Worker] = []
    for branch in data.get("branches", ()):
        count = branch.get("count", 1)
        for copy in range(count):
            turns = []
            for index, turn in enumerate(branch.get("turns", [branch])):
                shared, own = branch.get("sampling", {}), turn.get("sampling", {}) if turn is not branch else {}
                values = {**data["sampling"], **shared, **own}
                draw = (copy, 0) if "seed" in own else (copy, index) if "seed" in shared else (len(workers), index)
                values["seed"] = spread(values["seed"], *draw)
                turns.append(Turn(turn.get("prompt", ""), SamplingParams(**values), turn.get("output")))
            label = branch.get("label") or f"worker {len(workers) + 1}"
            workers.append(Worker(f"{label} {copy + 1}" if count > 1 and branch.get("label") else label, tuple(turns)))
    return workers


def spread(seed: int, worker: int, turn: int) -> int:
    """The seed of one turn of one worker: the first of both draws from `seed` as given, all others from seeds derived from it.

    Derived, not counted up: runs with neighbouring seeds would share most of their workers. `worker` counts all workers, or the copies
    of a branch where the branch or the turn brings the seed. 53 bits, which every reader of JSON takes for an integer.
    """
    if worker == turn == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {worker} {turn}".encode()).digest()[:8], "big") >> 11
