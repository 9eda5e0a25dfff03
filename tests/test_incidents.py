"""Synthetic incidents: their views together determine the causes, no view alone does; the tasks built on them; failure analysis."""

from collections import Counter
from dataclasses import replace

import pytest

from minips import Engine, SamplingParams, Synthesizer
from minips.evaluation import incidents
from minips.evaluation.agents import prepare, run_agents
from minips.evaluation.failures import bucket, failures
from minips.evaluation.incidents import LABELS, MONITORS, SCHEMAS, WITNESSES, deal, incident, views

MANY = [incident(0, index) for index in range(300)]


def cells(view):
    """The rows of a view's table as dicts, read from its text."""
    lines = [line.split(" | ") for line in view.splitlines()[1:]]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[1:]]


def suspects(monitor, view):
    """What one view speaks for: (label, table), by plain rules about its figures."""
    rows = cells(view)
    found = set()
    for row in rows:
        number = {name: float(value) for name, value in row.items() if value.replace(".", "", 1).isdigit()}
        if monitor == "statements":
            words = row["query"].split()
            each = number["rows"] / number["calls"]
            if words[0] == "INSERT" and each > 1000:
                found.add(("INSERT_LARGE_DATA", words[2]))
            if words[0] == "SELECT" and each > 1000:
                found.add(("FETCH_LARGE_DATA", words[3]))
            if words[0] == "UPDATE" and number["mean_ms"] > 1000:
                found.add(("LOCK_CONTENTION", words[1]))
        elif monitor == "locks":
            if row["state"] == "waiting" and number["sessions"] > 10 and number["longest_s"] > 10:
                found.add(("LOCK_CONTENTION", row["table"]))
            if row["mode"] == "ShareUpdateExclusive" and number["longest_s"] > 100:
                found.add(("VACUUM", row["table"]))
        elif monitor == "tuples":
            if number["inserted"] > 0.2 * number["live"]:
                found.add(("INSERT_LARGE_DATA", row["table"]))
            if number["dead"] > number["live"] and number["cleanups"] > 9:
                found.add(("VACUUM", row["table"]))
            if number["updated"] > 9000 and number["hot_percent"] < 10:
                found.add(("REDUNDANT_INDEX", row["table"]))
        elif monitor == "scans" and number["rows_by_whole_scans"] > 1e6:
            found.add(("FETCH_LARGE_DATA", row["table"]))
    if monitor == "indexes":
        idle = Counter((row["table"], row["columns"]) for row in rows if row["scans"] == "0")
        found |= {("REDUNDANT_INDEX", table) for (table, _), count in idle.items() if count > 1}
    return found


def diagnose(shown):
    """The causes: what two monitors say about the same table."""
    said = Counter(suspect for monitor, view in shown.items() for suspect in suspects(monitor, view))
    return {label for (label, _), monitors in said.items() if monitors == 2}


def test_a_rule_based_reader_finds_every_cause_from_the_views():
    assert all(diagnose(made.views) == set(made.causes) for made in MANY)


def test_the_reader_sees_each_trace_and_nothing_else():
    for made in MANY:
        for monitor in MONITORS:
            expected = {(label, table) for name, label, table in made.traces if name == monitor}
            assert suspects(monitor, made.views[monitor]) == expected


def twin(made, monitor, causes):
    """The same incident as `monitor` sees it, with other causes; None where that monitor would see the difference."""
    here = {trace for trace in made.traces if trace[0] == monitor}
    about = {label: table for _, label, table in made.traces}
    spare = [table for table in SCHEMAS[made.place].split() if table not in about.values()]
    traces = set(here)
    for label in causes:
        table = about.get(label) or spare.pop()
        traces |= {(name, label, table) for name in WITNESSES[label]}
    return frozenset(traces) if {trace for trace in traces if trace[0] == monitor} == here else None


def test_no_single_monitor_suffices():
    """For every incident and every monitor there is another incident with as many causes, whose view of it is the same text."""
    for made in MANY:
        pairs = [m.causes for m in MANY if len(m.causes) == len(made.causes) and m.causes != made.causes]
        for monitor in MONITORS:
            others = [other for causes in dict.fromkeys(pairs) if (other := twin(made, monitor, causes)) is not None]
            assert others, (made.id, monitor)
            shown = views(made.place, others[0], made.id.replace("-", "/"))
            assert shown[monitor] == made.views[monitor] and diagnose(shown) != set(made.causes)


def test_false_alarms_are_common():
    """One monitor's suspects are right hardly more often than not: guessing from the statements alone fails."""
    alarms = [len(made.traces) - 2 * len(made.causes) for made in MANY]
    assert min(alarms) >= 0 and sum(alarms) / len(alarms) > 1.5
    seen = [(label in made.causes) for made in MANY for name, label, _ in made.traces if name == "statements"]
    assert 0.3 < sum(seen) / len(seen) < 0.8


def test_no_view_names_a_label():
    names = [spelling for label in LABELS for spelling in (label, label.replace("_", " "), label.replace("_", ""))]
    for made in MANY:
        text = "\n".join(made.views.values()).lower()
        assert not [name for name in names if name.lower() in text]


def test_incidents_are_reproducible_balanced_and_do_not_depend_on_their_number():
    assert incident(0, 17) == MANY[17] and incident(1, 17).views != MANY[17].views
    assert len({made.id for made in MANY}) == len(MANY) and len({tuple(made.views.values()) for made in MANY}) == len(MANY)
    assert set(Counter(made.causes for made in MANY[:200]).values()) == {10, 20}  # each pair 10 times, each single cause 20 times
    assert {made.place for made in MANY} == set(SCHEMAS)


def test_monitors_are_dealt_over_the_workers():
    assert [len(deal(workers)) for workers in (1, 2, 3, 5, 9)] == [1, 2, 3, 5, 5]
    assert all(sorted(name for part in deal(workers) for name in part) == sorted(MONITORS) for workers in (1, 2, 3, 5, 9))


@pytest.fixture(scope="module")
def by_name():
    return {task.name: task for task in incidents.tasks()}


def test_the_three_forms(by_name):
    prompts, tools, given = (by_name[f"database_synthetic{end}"].load(None, 5, 0)[3] for end in ("", "_tools", "_views"))
    made = MANY[3]
    assert [made.views[name] in text for name, text in zip(MONITORS, prompts.worker_prompts, strict=True)] == [True] * 5
    assert not any(view in text for view in made.views.values() for text in tools.worker_prompts)
    assert given.passages == tuple(made.views.values()) and not given.worker_prompts
    for example in (prompts, tools, given):
        assert example.id == "0-3" and example.group == f"2: {' + '.join(made.causes)}"
        assert example.prefix.count("one or two causes") == example.prompt.count("one or two causes") == 1
        assert example.meta["root_causes"] == list(made.causes) and example.meta["number_of_labels_pred"] == 2
    assert by_name["database_synthetic_tools"].agents and not by_name["database_synthetic"].agents
    two = by_name["database_synthetic"].load(None, 2, 0)[0].worker_prompts
    assert len(two) == 2 and "locks just now" in two[1] and "indexes\n" in two[1]


def test_the_target_scores_full_marks_and_a_wrong_answer_none(by_name):
    for task in by_name.values():
        for example in task.load(None, 5, 0)[:20]:
            right = task.score(example.target, example, "minips")
            assert next(iter(right)) == task.metric and set(right.values()) == {1.0}
            others = [label for label in LABELS if label not in example.meta["root_causes"]]
            wrong = task.score(f'<answer>["{others[0]}"]</answer>', example, "minips")
            assert set(wrong.values()) == {0.0}


@pytest.mark.parametrize("workers", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_tool_workers_diagnose_with_the_default_model(default_model, by_name, workers):
    """End to end: the workers of two incidents in one batch, the first call made for them, then free turns, then the answer."""
    task = by_name["database_synthetic_tools"]
    engine = Engine.from_pretrained(default_model, max_kv_tokens=16_000)
    examples = task.load(None, workers, 0)[:2]
    if workers == 1:  # less to read, so that the test is quick
        examples = [replace(example, prefix="Why is this database slow?", prompt="Name the cause.") for example in examples]
    prepared = [prepare(example, workers) for example in examples]
    roots = [engine.prefill(example.prefix, system=example.system) for example, _ in prepared]
    branches = [branch for root, (example, _) in zip(roots, prepared) for branch in engine.fork(root, example.worker_prompts)]
    before, length = engine.stats(), sum(branch.num_tokens for branch in branches)
    traces = run_agents(engine, branches, [box for _, boxes in prepared for box in boxes], SamplingParams(max_tokens=12), max_turns=2)
    after = engine.stats()
    turns = [turn for trace in traces for turn in trace.turns]
    decoded = sum(turn.output_tokens for turn in turns if turn.ended != "given")
    grown = sum(branch.num_tokens for branch in branches) - length
    assert 0 < decoded == after["decoded_tokens"] - before["decoded_tokens"]
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == grown - decoded  # each token of the results once, nothing again
    assert [trace.turns[0].results for trace in traces] == [[made.views[name]] for made in MANY[:2] for name in MONITORS[:workers]]
    assert all(trace.text == branch.text and trace.finish_reason for trace, branch in zip(traces, branches))
    synthesizer = Synthesizer(engine)
    for at, (example, _) in enumerate(prepared):
        result = synthesizer.generate_from_caches(branches[workers * at : workers * (at + 1)], example.prompt, SamplingParams(max_tokens=8))
        assert 0 < result.num_branches <= workers and set(task.score(result.text, example, "minips").values()) <= {0.0, 0.5, 1.0}
    engine.close()
    assert engine.check()


# Failure analysis


def row(task, group, method, score, tokens):
    return {"task": task, "id": "1", "group": group, "methods": {method: {"scores": {"accuracy": score, "f1": 9}, "branch_tokens": tokens}}}


def test_failures_by_group_and_by_length():
    rows = [
        row("a", "x", "text", 1.0, [10, 30]),
        row("a", "x", "text", 0.0, [40, 40]),
        row("a", "", "text", 0.5, []),
        row("a", "y", "parallel", 1.0, [5000]),
        row("b", "y", "text", 0.0, [31, 32]),
        {"task": "b", "id": "2", "group": "y", "methods": {"text": {"error": "no room"}}},
    ]
    found = failures(rows)
    assert list(found) == ["a", "b"] and list(found["a"]) == ["text", "parallel"]
    text = found["a"]["text"]
    assert text["all"] == {"n": 3, "metric": 0.5}
    assert text["by_group"] == {"(none)": {"n": 1, "metric": 0.5}, "x": {"n": 2, "metric": 0.5}}
    assert text["by_length"] == {"0-31": {"n": 1, "metric": 1.0}, "32-63": {"n": 1, "metric": 0.0}}
    assert found["a"]["parallel"]["by_length"] == {"2048-": {"n": 1, "metric": 1.0}}
    assert found["b"]["text"] == {
        "all": {"n": 1, "metric": 0.0},
        "by_group": {"y": {"n": 1, "metric": 0.0}},
        "by_length": {"0-31": {"n": 1, "metric": 0.0}},
    }
    assert failures([]) == {}
    assert [bucket(n) for n in (0, 31.5, 32, 1024, 10**6)] == ["0-31", "0-31", "32-63", "1024-2047", "2048-"]
