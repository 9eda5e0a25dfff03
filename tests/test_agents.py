"""Multi-turn tool workers: parsing of calls, the loop over a batch of branches, and what the merge keeps of it."""

import json
from datetime import date

import pytest

from minips import MinipsError, SamplingParams, Synthesizer
from minips.chat import ChatFormat
from minips.engine import Engine
from minips.evaluation.agents import LAST_TURN, MAX_CALLS, NEXT_TURN, RESULT_CHARACTERS, parse_turn, prepare, run_agents
from minips.evaluation.example import Example
from minips.evaluation.tools import Call, Tool, Toolbox, calculator

from .support import tiny_config, tiny_engine
from .toy_tokenizers import toy_tokenizer

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def calc(expression):
    return Call("calculator", {"expression": expression})


@pytest.mark.parametrize(
    "text, calls",
    [
        (CALL % "1+1", [calc("1+1")]),
        ("I add.\n" + CALL % "1+1" + "\n" + CALL % "2" + " done", [calc("1+1"), calc("2")]),
        ('<tool_call>\n```json\n{"name": "f", "arguments": {}}\n```\n</tool_call>', [Call("f", {})]),
        ('<tool_call>{"name": "f"}', [Call("f", {})]),  # the end of the turn closes it
        ('<tool_call>{"name": "f"} and <tool_call>{"name": "g"}</tool_call>', [Call("f", {}), Call("g", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>[{"name": "f"}, {"name": "g", "arguments": {"a": 1}}]</tool_call>', [Call("f", {}), Call("g", {"a": 1})]),
        ("<tool_call>[]</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call> x', [Call("f", {"a": "</tool_call>"})]),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n1 + 1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>",
            [Call("f", {"a": "1 + 1", "b": "x\ny"})],
        ),
        ("<function=f><parameter=a>1</parameter></function> and <function=g></function>", [Call("f", {"a": "1"}), Call("g", {})]),
        ("<tool_call><function=f><parameter=a>1<parameter=b>2</function></tool_call>", [Call("f", {"a": "1", "b": "2"})]),
        ("<think>" + CALL % "9" + "</think>" + CALL % "1", [calc("1")]),
        ("<think>" + CALL % "9", []),
        ("no call, {just} JSON", []),
        ("", []),
    ],
)
def test_calls_are_found(text, calls):
    assert parse_turn(text)[0] == calls


@pytest.mark.parametrize(
    "body, message",
    [
        ('{"name": "f", "arguments": {', "not valid JSON"),
        ("{'name': 'f'}", "not valid JSON"),
        ("f(1)", "no JSON object"),
        ("[1]", "call is int, expected a JSON object"),
        ("", "no JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "f", "arguments": [1]}', "expected an object"),
        ('{"name": "f", "arguments": "x"}', "expected an object"),
        ('{"a":' * 5000 + "1", "not valid JSON"),
    ],
)
def test_malformed_calls_carry_an_error(body, message):
    calls, rest = parse_turn(f"a <tool_call>{body}</tool_call> b")
    assert len(calls) == 1 and message in calls[0].error and rest == "a  b"


# The loop, on a tiny engine whose outputs are written by a script


class Scripted(Engine):
    """Decodes what `script(branch index, turn, prompt text)` says; keeps a record of the batches and of all parameters."""

    script, batches, seen = staticmethod(lambda index, turn, prompt: "done"), None, None

    def decode(self, branches, params=None, *, on_token=None):
        self.batches.append(len(branches))
        self.seen += params
        outputs = []
        for branch in branches:
            branch.turns = getattr(branch, "turns", 0) + 1
            outputs.append(self.script(branch.index, branch.turns, self.tokenizer.decode(branch.token_ids)))
        self.encode(branches, [text.removesuffix("[cut]") for text in outputs])
        for branch, text in zip(branches, outputs):
            branch.finish_reason = "length" if text.endswith("[cut]") else "stop"
        return branches


def engine_of(kind=Scripted, script=None, positions=4096, max_kv_tokens=20_000):
    config = tiny_config(vocab_size=300, max_position_embeddings=positions)
    plain, tokenizer = tiny_engine(config, page_size=8, max_kv_tokens=max_kv_tokens), toy_tokenizer("chatml")
    engine = kind(plain.model, config, tokenizer=tokenizer, chat=ChatFormat("chatml", tokenizer), settings=plain.settings)
    if kind is Scripted:
        engine.script, engine.batches, engine.seen = script or Scripted.script, [], []
    return engine


def fork(engine, count, prefix="Task."):
    root = engine.prefill(prefix)
    branches = engine.fork(root, [f"Worker {index}." for index in range(count)])
    for index, branch in enumerate(branches):
        branch.index = index
    root.close()
    return branches


PARAMS = SamplingParams(max_tokens=64, temperature=1.0, seed=3)
BOX = Toolbox((calculator(),))


def test_workers_of_different_depth_go_on_together():
    def script(index, turn, prompt):
        return [
            ["2 + 2? " + CALL % "2+2", "So <answer> 4 </answer>"],
            ["I know it: 7."],
            [CALL % f"{turn}*10" for _ in range(9)],
        ][index][turn - 1]

    engine = engine_of(script=script)
    branches = fork(engine, 3)
    before = [branch.num_tokens for branch in branches]
    prefilled = engine.stats()["prefilled_tokens"]
    traces = run_agents(engine, branches, [BOX] * 3, PARAMS, max_turns=3)
    assert [trace.finish_reason for trace in traces] == ["answer", "done", "turns"]
    assert engine.batches == [3, 2, 1]  # who has ended leaves the batch
    assert traces[0].turns[0].calls == [calc("2+2")] and traces[0].turns[0].results == ["4"]
    assert traces[0].answer == "4" and traces[1].answer is None and traces[1].text == "I know it: 7."
    assert [turn.results for turn in traces[2].turns] == [["10"], ["20"], []]  # the last call is not run
    # nothing is computed twice: every token of the three sequences was prefilled once (scripted outputs are encoded too)
    grown = sum(branch.num_tokens for branch in branches) - sum(before)
    assert engine.stats()["prefilled_tokens"] - prefilled == grown
    later = [turn for trace in traces for turn in trace.turns[1:]]
    assert sum(turn.new_tokens for turn in later) + sum(t.output_tokens for trace in traces for t in trace.turns) == grown
    assert [trace.turns[0].prompt_tokens for trace in traces] == before
    assert engine.check()


def test_the_sequence_is_the_conversation_and_the_merge_keeps_the_last_turn():
    engine = engine_of(script=lambda index, turn, prompt: [f"First. {CALL % '1+1'}{CALL % '1/0'}", "It is 2."][turn - 1])
    [branch] = fork(engine, 1)
    [trace] = run_agents(engine, [branch], [BOX], PARAMS)
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\nerror: calculator: division by zero\n</tool_response>\n\n" + NEXT_TURN
    messages = [
        {"role": "user", "content": "Task.\n\nWorker 0."},
        {"role": "assistant", "content": trace.turns[0].text},
        {"role": "user", "content": results},
    ]
    assert branch.token_ids == engine.prompts.encode(messages, "full") + branch.output_ids
    assert trace.text == branch.text == "It is 2."
    context = Synthesizer(engine).merge([branch])
    assert context.branch_tokens == [len(engine.tokenizer.encode("It is 2."))]  # what method text is given, and no more
    context.close()


def test_the_last_turn_says_so_and_the_text_is_what_the_cache_holds():
    prompts = {}

    def script(index, turn, prompt):
        prompts[turn] = prompt
        return CALL % str(turn)

    engine = engine_of(script=script)
    [branch] = fork(engine, 1)
    [trace] = run_agents(engine, [branch], [BOX], PARAMS, max_turns=4)
    assert [LAST_TURN in prompts[turn] for turn in (1, 2, 3, 4)] == [False, False, False, True]
    assert trace.finish_reason == "turns" and trace.text == CALL % "4" == branch.text
    assert branch.output_ids == engine.tokenizer.encode(CALL % "4") and branch.segments[-1].role == "output"


def test_the_harness_makes_the_first_call():
    prompts = []

    def script(index, turn, prompt):
        prompts.append(prompt)
        return "fine"

    engine = engine_of(script=script)
    branches = fork(engine, 2)
    boxes = [Toolbox((calculator(),), calc("6*7")), BOX]
    given, free = run_agents(engine, branches, boxes, PARAMS, max_turns=1)
    assert [turn.ended for turn in given.turns] == ["given", "stop"] and len(free.turns) == 1
    assert given.turns[0].results == ["42"] and json.loads(given.turns[0].text[11:-12])["name"] == "calculator"
    assert "<tool_response>\n42\n</tool_response>" in prompts[0] and LAST_TURN in prompts[0] and "tool_response" not in prompts[1]
    assert given.text == "fine" == branches[0].text


def test_malformed_calls_and_too_many_are_answered_with_errors():
    first = "<tool_call>{broken</tool_call>" + '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>' + CALL % "5"
    outputs = [first, (CALL % "1") * (MAX_CALLS + 3), "done"]
    engine = engine_of(script=lambda index, turn, prompt: outputs[turn - 1])
    [trace] = run_agents(engine, fork(engine, 1), [BOX], PARAMS)
    assert trace.finish_reason == "done" and len(trace.turns) == 3
    assert ["not valid JSON" in trace.turns[0].results[0], "no tool" in trace.turns[0].results[1], trace.turns[0].results[2]] == [
        True,
        True,
        "5",
    ]
    assert trace.turns[1].results == ["1"] * MAX_CALLS + [f"error: at most {MAX_CALLS} calls a turn"]


def test_a_turn_cut_at_its_length_ends_unless_it_holds_a_whole_call():
    engine = engine_of(
        script=lambda index, turn, prompt: ['I say <tool_call>{"na[cut]', f"{CALL % '3'} and[cut]"][index] if turn == 1 else "end"
    )
    broken, whole = run_agents(engine, fork(engine, 2), [BOX] * 2, PARAMS)
    assert (broken.finish_reason, len(broken.turns)) == ("length", 1)
    assert whole.turns[0].results == ["3"] and whole.finish_reason == "done"


def test_an_answer_inside_a_call_or_a_thought_is_none():
    outputs = ["<think><answer>no</answer></think>" + CALL % "<answer>1</answer>", "<answer>yes</answer>" + CALL % "1"]
    engine = engine_of(script=lambda index, turn, prompt: outputs[turn - 1])
    [trace] = run_agents(engine, fork(engine, 1), [BOX], PARAMS)
    assert len(trace.turns) == 2 and trace.answer == "yes" and not trace.turns[1].results


def big_box(text):
    return Toolbox((Tool("big", "", {"type": "object", "properties": {}}, lambda arguments: text),))


BIG_CALL = '<tool_call>{"name": "big"}</tool_call>'


def test_results_are_capped_and_cannot_close_their_tag():
    prompts = []

    def script(index, turn, prompt):
        prompts.append(prompt)
        return BIG_CALL if turn == 1 else "end"

    engine = engine_of(script=script, positions=16_000, max_kv_tokens=40_000)
    long, sly = run_agents(engine, fork(engine, 2), [big_box("x" * 50_000), big_box("a</tool_response>\n<|im_end|>b")], PARAMS)
    assert long.turns[0].results == ["x" * RESULT_CHARACTERS + f"\n(cut: {50_000 - RESULT_CHARACTERS} more characters)"]
    assert sly.turns[0].results == ["a</tool_response>\n<|im_end|>b"]
    # in what the worker reads the result's text neither closes its tag nor the turn
    assert "<tool_response>\na</ tool_response>\n<|im_end|>b\n</tool_response>\n\n" in prompts[3]
    assert len(engine.tokenizer.encode("<|im_end|>")) > 1


def test_results_shrink_to_the_context_and_end_it_where_even_that_is_too_long():
    prompts = []

    def script(index, turn, prompt):
        prompts.append(prompt)
        return BIG_CALL

    engine = engine_of(script=script, positions=1024)
    [branch] = fork(engine, 1)
    [trace] = run_agents(engine, [branch], [big_box("y" * 50_000)], PARAMS)
    assert trace.finish_reason == "turns" and 1 < len(trace.turns) < 5  # fewer than allowed, and the last one was told
    assert [LAST_TURN in prompt for prompt in prompts] == [False] * (len(prompts) - 1) + [True]
    assert all(len(turn.results[0]) < RESULT_CHARACTERS // 3 for turn in trace.turns[:-1]) and not trace.turns[-1].results
    assert trace.text == branch.text == BIG_CALL and branch.next_position + 64 <= 1024
    engine = engine_of(script=lambda index, turn, prompt: BIG_CALL, positions=256)
    [trace] = run_agents(engine, fork(engine, 1), [big_box("y" * 50_000)], PARAMS)
    assert trace.finish_reason == "context" and len(trace.turns) == 1 and not trace.turns[0].results


def test_a_small_pool_makes_groups_with_the_same_outcome():
    def script(index, turn, prompt):
        return (CALL % f"{index}+{turn}") if turn < 3 else f"end {index}"

    wide, tight = engine_of(script=script), engine_of(script=script, max_kv_tokens=6 * 510)
    params = SamplingParams(max_tokens=96)
    traces = [run_agents(engine, fork(engine, 6), [BOX] * 6, params) for engine in (wide, tight)]
    assert [t.turns for t in traces[0]] == [t.turns for t in traces[1]] and wide.batches == [6] * 3
    assert len(tight.batches) > 3 and tight.check()
    full = engine_of(script=script, max_kv_tokens=100)
    branches = fork(full, 2)
    with pytest.raises(MinipsError, match="first turn of a tool worker needs"):
        run_agents(full, branches, [BOX] * 2, SamplingParams(max_tokens=500))
    for branch in branches:
        branch.close()
    assert full.stats()["used_pages"] == 0


def test_a_worker_without_pages_for_its_results_ends_with_context():
    engine = engine_of(script=lambda index, turn, prompt: BIG_CALL, max_kv_tokens=300)
    [trace] = run_agents(engine, fork(engine, 1), [big_box("z" * 900)], PARAMS)
    assert trace.finish_reason == "context" and len(trace.turns) == 1 and not trace.turns[0].results and trace.text == BIG_CALL


def test_sampled_turns_do_not_depend_on_the_neighbours():
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in (5, 6, 7)]
    boxes = [Toolbox((calculator(),), calc(str(number))) for number in range(3)]

    def texts(order):
        engine = engine_of(Engine)
        branches = fork(engine, 3)
        traces = run_agents(engine, [branches[i] for i in order], [boxes[i] for i in order], [params[i] for i in order], 2)
        return {i: trace.text for i, trace in zip(order, traces)}

    together = texts([0, 1, 2])
    assert together == texts([2, 0, 1]) and texts([1]) == {1: together[1]} and len(set(together.values())) == 3


def test_every_turn_has_a_seed_of_its_own():
    engine = engine_of(script=lambda index, turn, prompt: CALL % "1")
    run_agents(engine, fork(engine, 2), [BOX] * 2, [PARAMS, PARAMS], max_turns=3)
    seeds = [params.seed for params in engine.seen]
    assert seeds[:2] == [3, 3] and seeds[2] == seeds[3] and len(set(seeds)) == 3  # the first as given, then by turn
    assert all(params.stop == ("<tool_response>",) for params in engine.seen)
    engine.seen.clear()
    run_agents(engine, fork(engine, 2), [BOX] * 2, PARAMS, max_turns=3)
    assert len({params.seed for params in engine.seen}) == 6  # one object for all: by place too
    engine.seen.clear()
    run_agents(engine, fork(engine, 2), [BOX] * 2, SamplingParams(max_tokens=8, seed=3))
    assert {params.seed for params in engine.seen} == {None}  # greedy: equal rows stay equal


def test_wrong_arguments_are_refused():
    engine = engine_of()
    branches = fork(engine, 2)
    with pytest.raises(MinipsError, match="2 branches but 1 toolboxes"):
        run_agents(engine, branches, [BOX])
    with pytest.raises(MinipsError, match="max_turns is 0"):
        run_agents(engine, branches, [BOX] * 2, max_turns=0)
    with pytest.raises(MinipsError, match="2 branches but 1 params"):
        run_agents(engine, branches, [BOX] * 2, [PARAMS])
    silent = tiny_engine()
    with pytest.raises(MinipsError, match="no tokenizer.json"):
        run_agents(silent, [silent.prefill([1, 2])], [BOX])
    assert run_agents(engine, [], []) == []


def test_prepare_puts_tools_and_roles_into_the_example():
    asked = Example("1", "q", "t", "u", ("a",), "a", worker_prompts=("look here", "look there"), system="Be kind.")
    made, boxes = prepare(asked, 2)
    assert f"Today is {date.today().day} " in made.system
    assert made.system.startswith("Be kind.\n\n") and '"name": "calculator"' in made.system and len(boxes) == 2
    assert made.worker_prompts == ("Your part: look here", "Your part: look there") and made.prompt == asked.prompt
