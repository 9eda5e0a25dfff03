"""Each evaluation method equals what it says it is, leaves the branches as they are, and gives its pages back."""

from dataclasses import replace

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.chat import text_prompt
from minips.chat import SUMMARY_PROMPT
from minips.evaluation.methods import APE, METHODS, Setup, check_method, run_method
from minips.evaluation.rows import open_rows, seed_of

from .evaluation_support import asked, given, task_of, text_engine

GIVEN = [given("rose"), given("lily", ("x" * 9, "yy")), given("iris", ("only this",))]
ASKED = [asked("rain"), asked("snow", ("part one", "part two"))]
SAMPLED = SamplingParams(max_tokens=7, temperature=0.9)
ANSWER = SamplingParams(max_tokens=6)


@pytest.fixture
def opened():
    engine = text_engine()
    task = task_of([*GIVEN, *ASKED])
    rows = open_rows(engine, task, [*GIVEN, *ASKED], 3, SAMPLED, seed=1)
    yield engine, Setup(engine, task, ANSWER), rows
    for row in rows:
        row.close()
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_rows_have_the_branches_that_their_examples_ask_for(opened):
    engine, _, rows = opened
    assert [len(row.branches) for row in rows] == [3, 2, 1, 3, 2]
    assert [row.texts for row in rows[:3]] == [list(example.passages) for example in GIVEN]
    assert all(len(branch.output_ids) <= 7 for row in rows[3:] for branch in row.branches)
    alone = open_rows(engine, task_of(ASKED), ASKED[:1], 3, SAMPLED, seed=1)[0]
    assert alone.texts == rows[3].texts, "a row depends on the rows beside it"
    assert len(set(alone.texts)) > 1 and seed_of(1, "rain", 0) != seed_of(1, "rain", 1)
    alone.close()


@pytest.mark.parametrize("spec", METHODS)
def test_every_method_answers_every_row_and_changes_no_branch(opened, spec):
    engine, setup, rows = opened
    pages, keys = engine.stats()["used_pages"], [keys.clone() for keys in engine.pool.keys]
    held = sorted({page for row in rows for branch in row.branches for segment in branch.segments for page in segment.pages})
    results = run_method(spec, setup, rows)
    assert len(results) == len(rows) and engine.stats()["used_pages"] == pages and engine.check()
    for before, after in zip(keys, engine.pool.keys):
        assert torch.equal(before[held], after[held])
    for row, result in zip(rows, results):
        assert result.finish_reason in ("stop", "length") and len(result.token_ids) <= 7
        if spec != "best_of_n":
            assert result.scores.token_ids == engine.tokenizer.encode(row.example.target)
    again = run_method(spec, setup, rows[1:2])
    assert again[0].token_ids == results[1].token_ids, "an answer depends on the rows beside it"


@pytest.mark.parametrize(
    "spec, options", [("parallel", {}), ("reuse", {"layout": "sequential"}), ("naive", {"rerotate": False}), ("ape", APE)]
)
def test_cache_methods_are_merges_with_their_options(opened, spec, options):
    engine, setup, rows = opened
    synthesizer = Synthesizer(engine, options=options)
    for row, result in zip(rows, run_method(spec, setup, rows)):
        with synthesizer.merge(row.branches, consume=False) as context:
            alone = synthesizer.generate(context=context, prompt=row.example.prompt, params=ANSWER)
            scores = synthesizer.score(context, row.example.prompt, row.example.target)
        assert alone.token_ids == result.token_ids and alone.branch_tokens == result.branch_tokens
        assert scores.mean_nll == pytest.approx(result.scores.mean_nll, abs=1e-5)


def test_text_methods_are_plain_prompts(opened):
    engine, setup, rows = opened
    headed, turn = run_method("text", setup, rows), run_method("text_turn", setup, rows)
    for row, one, two in zip(rows, headed, turn):
        prompt = text_prompt(row.example.prefix, row.texts, row.example.prompt)
        assert engine.generate(prompt, ANSWER).token_ids == one.token_ids
        assert engine.score(prompt, row.example.target).mean_nll == pytest.approx(one.scores.mean_nll, abs=1e-5)
        turns = zip(("user", "assistant", "user"), (row.example.prefix, "\n\n".join(row.texts), row.example.prompt))
        messages = [{"role": role, "content": content} for role, content in turns]
        assert engine.generate(messages, ANSWER).token_ids == two.token_ids


def test_summaries_are_made_by_the_workers_and_read_as_text(opened, monkeypatch):
    engine, setup, rows = opened
    monkeypatch.setattr("minips.evaluation.methods.SUMMARY_TOKENS", 5)
    found = run_method("summary", setup, rows[:1])[0]
    child = rows[0].branches[0].child()
    engine.decode(engine.extend([child], [SUMMARY_PROMPT]), SamplingParams(max_tokens=5))
    first = child.text
    child.close()
    assert found.prefilled_tokens == len(
        engine.prompts.encode(text_prompt(GIVEN[0].prefix, [first, "?", "?"], GIVEN[0].prompt), "full")
    ) + sum(len(engine.tokenizer.encode(text)) - 1 for text in _summaries(engine, rows[0])[1:]) + 3 * len(
        engine.prompts.encode(SUMMARY_PROMPT, "continuation")
    )


def _summaries(engine, row):
    children = [branch.child() for branch in row.branches]
    engine.decode(engine.extend(children, [SUMMARY_PROMPT] * len(children)), SamplingParams(max_tokens=5))
    texts = [child.text for child in children]
    for child in children:
        child.close()
    return texts


def test_single_is_the_first_worker_or_the_first_passage(opened):
    engine, setup, rows = opened
    results = run_method("single", setup, rows)
    assert results[3].token_ids == rows[3].branches[0].output_ids and results[3].prefilled_tokens == 0
    synthesizer = Synthesizer(engine)
    with synthesizer.merge(rows[0].branches[:1], consume=False) as context:
        assert synthesizer.generate(context=context, prompt=GIVEN[0].prompt, params=ANSWER).token_ids == results[0].token_ids


def test_best_of_n_takes_the_majority_and_the_first_of_equals(opened):
    engine, setup, rows = opened
    row = rows[3]
    for letters, chosen in (("xyy", 1), ("xyz", 0), ("-yx", 1), ("---", 0), ("yxy", 0)):
        answers = dict(zip((branch.text for branch in row.branches), letters))
        if len(answers) < 3:
            pytest.skip("two workers wrote the same")
        voting = replace(setup, task=replace(setup.task, extract=lambda text, example, rules: answers[text].strip("-") or None))
        assert run_method("best_of_n", voting, [row])[0].text == row.texts[chosen], letters
    scored = replace(setup, scorer=lambda example, texts: len(texts) - 1)
    found = run_method("best_of_n", scored, rows)
    assert found[3].text == row.texts[-1] and found[3].prefilled_tokens == 0
    prompt = len(engine.prompts.encode(GIVEN[0].prompt, "continuation"))
    assert found[0].prefilled_tokens == 3 * prompt, "all that was prefilled counts, not only the answer that was chosen"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("magic", "method 'magic' is unknown"),
        ("reuse@x", "only parallel, text, text_turn take an adapter"),
        ("parallel@", "as NAME@ADAPTER"),
        ("", "is unknown"),
    ],
)
def test_unknown_methods_are_refused(spec, message):
    with pytest.raises(MinipsError, match=message):
        check_method(spec)


def test_a_method_can_name_its_adapter(opened):
    engine, setup, rows = opened
    check_method("parallel@none")
    named = replace(setup, adapter="/no/such/folder", synthesizers={})
    assert run_method("parallel@none", named, rows[:1])[0].token_ids == run_method("parallel", setup, rows[:1])[0].token_ids
    assert run_method("text", named, rows[:1])[0].token_ids == run_method("text", setup, rows[:1])[0].token_ids
    for spec in ("parallel", "text@/no/such/folder"):
        with pytest.raises(MinipsError, match="/no/such/folder"):
            run_method(spec, named, rows[:1])
