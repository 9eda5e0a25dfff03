"""Multi-turn tool workers: many branches think, call tools and read the results together, as one ragged batch a turn.

A turn is what one `engine.decode` gives. The results of its calls are appended with `engine.extend`, so nothing is prefilled twice.
The last decoded span is at once the text that method `text` is given and what the merge keeps by default: where a limit ends a
worker on a tool call, that call stays unrun, so that both see the same turn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from ..config import SamplingParams
from ..engine import Engine
from ..errors import MinipsError
from ..kv_cache import Branch
from ..sampling import params_for
from .example import Example
from .tools import Call, Toolbox, agent_system, toolboxes

MAX_TURNS = 5
MAX_CALLS = 8  # of one turn
RESULT_CHARACTERS = 6200  # of one result, the marks of `read_file` included; less where the context is short
# A question stands behind the results: after a bare result small models write one themselves, or nothing.
NEXT_TURN = "What does this tell you about your part? Report it, or call another tool."
LAST_TURN = "This is your last turn, so call no tool. What did you find? Give your final answer."
_CALL, _CALL_END, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_CALL_START = re.compile(f"{_CALL}|{_FUNCTION}")
_JSON = re.compile(r"[{\[]")
_XML = re.compile(r"\s*<function=([^>\s]{1,100})\s*>")
_PARAMETER = re.compile(r"<parameter=([^>]{1,100})>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass
class Turn:
    """prompt_tokens: length of the context that it was decoded from; new_tokens: those of it that were prefilled for this turn.

    text and output_tokens: what came out; ended: stop, length, or given for the harness's own call. results: one for each call that
    was run, as the worker read it (shortened where it was too long).
    """

    prompt_tokens: int
    new_tokens: int
    text: str
    output_tokens: int
    ended: str
    calls: list[Call] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


@dataclass
class Trace:
    """What one worker did. finish_reason: answer (an <answer> block), done (a turn without a call), length (the last turn was cut
    by max_tokens), turns (the turn limit), or context (no room left for the results)."""

    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        """The last turn's output: what the synthesizer is given."""
        return self.turns[-1].text if self.turns else ""

    @property
    def answer(self) -> str | None:
        """Content of the last turn's first <answer> block, None where it has none."""
        found = _ANSWER.search(parse_turn(self.text)[1])
        return found[1].strip() if found else None


@dataclass
class _Worker:
    branch: Branch
    toolbox: Toolbox
    params: SamplingParams
    trace: Trace = field(default_factory=Trace)
    new_tokens: int = 0  # of its context, prefilled since the last turn (its own prompt counts for the first)
    message: list[int] = field(default_factory=list)  # ids of the results that the next turn starts with
    last: bool = False  # it has been told so

    @property
    def open(self) -> bool:
        return not self.trace.finish_reason


def prepare(example: Example, workers: int) -> tuple[Example, list[Toolbox]]:
    """An example as tool workers get it, and one toolbox a worker: the tools in its system text, a role for each worker.

    The system text also says today's date, except for the diagnosis of a database, which is the same on every day.
    Raises MinipsError where the tools need what is not there (database_diagnosis without a database).
    """
    boxes = toolboxes(example, workers)
    today = None if "root_causes" in example.meta else date.today()
    system = "\n\n".join(filter(None, (example.system, agent_system(boxes[0], today))))
    prompts = tuple(f"Your part: {prompt}" for prompt in example.worker_prompts)
    return replace(example, system=system, worker_prompts=prompts), boxes


def run_agents(
    engine: Engine,
    branches: Sequence[Branch],
    boxes: Sequence[Toolbox],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    max_turns: int = MAX_TURNS,
) -> list[Trace]:
    """Let all branches (of any number of rows), just forked, work in turns; they come back with their last turn as z.

    boxes: one a branch. params: for each turn; max_tokens counts a turn. Every turn of a branch draws from a seed of its own,
    made of its parameters' seed (for shared parameters also of its place), so a branch does not depend on its neighbours.
    A toolbox with a first call starts with it as a given turn, which does not count in max_turns. A branch that ends leaves
    the batch; one that cannot go on for want of room ends with "context". Raises MinipsError where not even the first turn fits.
    """
    branches = engine.check_branches(branches, "run_agents")
    if engine.tokenizer is None:
        raise MinipsError("run_agents: tool calls are text, and the model has no tokenizer.json")
    if len(boxes) != len(branches):
        raise MinipsError(f"run_agents: {len(branches)} branches but {len(boxes)} toolboxes, expected one each")
    if max_turns < 1:
        raise MinipsError(f"run_agents: max_turns is {max_turns}, expected at least 1")
    shared = params is None or isinstance(params, SamplingParams)
    each = params_for(params, len(branches), "run_agents")
    if shared:
        each = [replace(own, seed=_seed(own.seed, "branch", at)) for at, own in enumerate(each)]
    workers = [_Worker(*parts) for parts in zip(branches, boxes, each)]
    for worker in workers:
        segments = worker.branch.segments[worker.branch.fork_depth :]
        worker.new_tokens = sum(segment.length for segment in segments)
    _first_calls(engine, workers, max_turns == 1)
    for number in range(max_turns):
        active = [worker for worker in workers if worker.open]
        for group in _groups(engine, active):
            _turn(engine, group, number)
        for worker in filter(lambda w: w.open, active):
            worker.trace.finish_reason = _judge(worker, number + 1 == max_turns)
            if worker.open:
                _run_calls(engine, worker, number + 2 == max_turns)
    return [worker.trace for worker in workers]


def _first_calls(engine: Engine, workers: Sequence[_Worker], last: bool) -> None:
    """Put the harness's own call into the mouth of each worker whose toolbox has one, and run it."""
    starting = [worker for worker in workers if worker.toolbox.first_call is not None]
    if not starting:
        return
    calls = [worker.toolbox.first_call for worker in starting]
    texts = [f"{_CALL}{json.dumps({'name': c.name, 'arguments': c.arguments}, ensure_ascii=False)}{_CALL_END}" for c in calls]
    before = [worker.branch.num_tokens for worker in starting]
    engine.encode([worker.branch for worker in starting], texts)
    for worker, call, text, prompt in zip(starting, calls, texts, before):
        made = len(worker.branch.output_ids)
        worker.trace.turns.append(Turn(prompt, worker.new_tokens, text, made, "given", [call]))
        _run_calls(engine, worker, last)


def _turn(engine: Engine, group: Sequence[_Worker], number: int) -> None:
    """One turn of workers that fit the pool together: results in, tokens out."""
    waiting = [worker for worker in group if worker.message]
    engine.extend([worker.branch for worker in waiting], [worker.message for worker in waiting])
    for worker in waiting:
        worker.new_tokens, worker.message = len(worker.message), []
    before = [worker.branch.num_tokens for worker in group]
    # a model that goes on to invent the result itself is stopped there
    stop = "<tool_response>"
    params = [replace(w.params, seed=_turn_seed(w.params, number), stop=(*w.params.stop, stop)) for w in group]
    engine.decode([worker.branch for worker in group], params)
    for worker, prompt in zip(group, before):
        branch = worker.branch
        worker.trace.turns.append(Turn(prompt, worker.new_tokens, branch.text, len(branch.output_ids), branch.finish_reason))


def _judge(worker: _Worker, last: bool) -> str:
    """Why the worker ends with the turn just made; "" where its calls are to be run."""
    turn = worker.trace.turns[-1]
    turn.calls, rest = parse_turn(turn.text)
    cut = turn.ended == "length"
    if _ANSWER.search(rest):
        return "answer"
    if all(call.error for call in turn.calls) and (cut or not turn.calls):
        return "length" if cut else "done"
    return "turns" if last or worker.last else ""


def _run_calls(engine: Engine, worker: _Worker, last: bool) -> None:
    """Run the calls of the last turn and make the message with their results, shorter where the context is short of room."""
    turn, branch = worker.trace.turns[-1], worker.branch
    results = [worker.toolbox.run(call) for call in turn.calls[:MAX_CALLS]]
    results += [f"error: at most {MAX_CALLS} calls a turn"] * (len(turn.calls) > MAX_CALLS)
    reserve = min(worker.params.max_tokens, engine.config.max_position_embeddings // 4)  # for the answer
    for characters in (RESULT_CHARACTERS, RESULT_CHARACTERS // 4, RESULT_CHARACTERS // 16):
        shown = [_shortened(result, characters) for result in results]
        ids, room = _message_ids(engine, branch, shown, last)
        # a turn after the next would need room for two answers and at least one short result
        worker.last = last or room < 2 * reserve + RESULT_CHARACTERS // 16
        if worker.last and not last:
            ids, room = _message_ids(engine, branch, shown, True)
        if room >= reserve:
            turn.results, worker.message = shown, ids
            return
    worker.trace.finish_reason = "context"


def _message_ids(engine: Engine, branch: Branch, results: Sequence[str], last: bool) -> tuple[list[int], int]:
    """Ids of the user turn that carries results (whose text cannot close its tag), and the positions left behind it."""
    blocks = [f"<tool_response>\n{result.replace('</tool_response', '</ tool_response')}\n</tool_response>" for result in results]
    text = "\n".join([*blocks, "", LAST_TURN if last else NEXT_TURN])
    ids = engine.prompts.encode(text, "continuation", raw=branch.raw)
    return ids, engine.config.max_position_embeddings - branch.next_position - len(ids)


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}\n(cut: {len(text) - characters} more characters)"


def _groups(engine: Engine, workers: Sequence[_Worker]) -> Iterator[list[_Worker]]:
    """Workers in order, in groups that fit the page pool together; pages that a group does not use are there for the next one."""
    left = list(workers)
    while left:
        free, group = engine.pool.num_free, []
        while left and (pages := _pages(engine, left[0])) <= free:
            free -= pages
            group.append(left.pop(0))
        if group:
            yield group
            continue
        worker = left.pop(0)
        if not worker.trace.turns:
            engine.pool.require(_pages(engine, worker), "the first turn of a tool worker")
        worker.trace.turns[-1].results, worker.trace.finish_reason = [], "context"  # they never reached it


def _pages(engine: Engine, worker: _Worker) -> int:
    """Pages that the next turn may need."""
    message = len(worker.message)
    return engine.pool.pages_for(message) + engine.pool.pages_for(engine.token_limit(worker.branch.next_position + message, worker.params))


def _turn_seed(params: SamplingParams, number: int) -> int | None:
    """The given seed for the first turn; none where it is of no use, so that equal greedy rows are seen to be equal."""
    return None if params.greedy else params.seed if number == 0 else _seed(params.seed, "turn", number)


def _seed(seed: int | None, *parts: object) -> int | None:
    return None if seed is None else random.Random(repr((seed, *parts))).getrandbits(63)


def parse_turn(text: str) -> tuple[list[Call], str]:
    """The tool calls of an output, and the text around them; thoughts (up to </think>, or an unclosed <think>) are in neither.

    A call is JSON (an object, or a list of them) in <tool_call> tags, or Qwen's XML form <function=NAME><parameter=NAME>VALUE, with or without those tags.
    One that cannot be read has its `error` set.
    """
    text = text.rsplit("</think>", 1)[-1]
    text = text.split("<think>", 1)[0]
    calls, rest, at = [], [], 0
    while found := _CALL_START.search(text, at):
        rest.append(text[at : found.start()])
        read, at = _read_calls(text, found.start())
        calls += read
    return calls, "".join([*rest, text[at:]])


def _read_calls(text: str, start: int) -> tuple[list[Call], int]:
    """The calls whose mark stands at `start` (JSON may hold a list of them), and where the text goes on behind them."""
    begin = start + len(_CALL) if text.startswith(_CALL, start) else start
    close = text.find(_CALL_END, begin)
    end = close + len(_CALL_END) if close >= 0 else len(text)
    if named := _XML.match(text, begin):
        finish = text.find("</function>", named.end())
        body = text[named.end() : min((at for at in (finish, close) if at >= 0), default=len(text))]
        if finish >= 0 and begin == start:  # without the tags around it
            end = finish + len("</function>")
        return [Call(named[1], {name.strip(): value for name, value in _PARAMETER.findall(body)})], end
    opening = _JSON.search(text, begin, end)
    if opening is None:
        return [Call("", {}, "the call holds no JSON object")], end
    try:
        data, finish = json.JSONDecoder().raw_decode(text, opening.start())
    except (ValueError, RecursionError) as error:
        return [Call("", {}, f"the call is not valid JSON ({str(error)[:80]})")], end
    # the object may hold the closing tag in a string, so what counts is the first one behind it
    close = text.find(_CALL_END, finish)
    another = text.find(_CALL, finish)
    end = close + len(_CALL_END) if close >= 0 and not 0 <= another < close else finish
    return [_checked_call(item) for item in data] if isinstance(data, list) else [_checked_call(data)], end


def _checked_call(data: object) -> Call:
    """A call from parsed JSON; arguments may be a JSON object in a string, or be called parameters."""
    if not isinstance(data, dict):
        return Call("", {}, f"the call is {type(data).__name__}, expected a JSON object")
    name, arguments = data.get("name"), data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    if not isinstance(name, str) or not name:
        return Call("", {}, 'the call has no "name"')
    if not isinstance(arguments, dict):
        return Call(name, {}, f'"arguments" is {type(arguments).__name__}, expected an object')
    return Call(name, arguments)
