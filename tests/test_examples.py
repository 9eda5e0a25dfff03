"""The packaged examples: graphs in plain Python and in LangGraph, and a result that repeats itself."""

import builtins
import json

import pytest

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.examples import langgraph_orchestrator, orchestrator
from minips.generate import main
from minips.workflow import complete, read_workflow

from .support import chat_engine

SHORT = SamplingParams(max_tokens=6, temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def engine():
    return chat_engine()


@pytest.fixture(scope="module")
def real(default_model):
    return Engine.from_pretrained(max_kv_tokens=4096)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for module in (orchestrator, langgraph_orchestrator):
        monkeypatch.setattr(module, "WORKER", SHORT)
        monkeypatch.setattr(module, "ANSWER", SamplingParams(max_tokens=6))


def test_both_graphs_answer_and_only_text_is_read_again(real):
    state = orchestrator.orchestrate(real, "How does one learn to swim?")
    text, caches = state["text"], state["caches"]
    assert text.text and caches.text and caches.num_branches == len(orchestrator.ROLES)
    assert text.reused_tokens == 0 and caches.prefilled_tokens < text.prefilled_tokens
    assert orchestrator.report(state).count("first token after") == 2
    assert real.stats()["used_pages"] == 0 and real.check()


def test_langgraph_gives_the_same_answer_in_the_same_order(engine):
    pytest.importorskip("langgraph")
    task = "How does one learn to swim?"
    expected = orchestrator.orchestrate(engine, task)["caches"]
    state = langgraph_orchestrator.orchestrate(engine, task)
    assert state["result"].token_ids == expected.token_ids and [number for number, _ in state["branches"]] == [0, 1, 2]
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_the_reducer_keeps_order():
    assert langgraph_orchestrator.in_order([(2, "c")], langgraph_orchestrator.in_order([(1, "b")], [(0, "a")])) == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]


def test_a_failing_graph_leaves_no_branch_open(engine, monkeypatch):
    def broken(*_, **__):
        raise MinipsError("broken")

    monkeypatch.setattr(Synthesizer, "generate_from_caches", broken)
    pytest.importorskip("langgraph")
    for module in (orchestrator, langgraph_orchestrator):
        with pytest.raises(MinipsError, match="broken"):
            module.orchestrate(engine, "x")
        assert engine.stats()["used_pages"] == 0


def test_langgraph_missing_is_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("langgraph."):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MinipsError, match="needs LangGraph: pip install langgraph"):
        langgraph_orchestrator.build_graph(None, None)


@pytest.mark.parametrize("module", [orchestrator, langgraph_orchestrator])
def test_an_unknown_model_is_one_line(module, capsys):
    assert module.main(["x", "--model", "/no/such/folder"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "name, method, model",
    [
        ("trajectories", "parallel", "engine"),
        ("samples", "parallel", "engine"),
        ("samples", "best-of-n", "engine"),
        ("subtasks", "summary", "engine"),
        ("documents", "text", "engine"),
        ("documents", "parallel", "real"),
    ],
)
def test_an_example_fed_back_repeats_itself(name, method, model, capsys, tmp_path, request, monkeypatch):
    engine = request.getfixturevalue(model)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine)
    if model == "engine":  # the shipped adapter is for the real model
        monkeypatch.setattr("minips.shipped.weights_folders", lambda: [])
    short = ["--json", "--quiet"]
    code = main(["--workflow", name, "--method", method, "--worker-tokens", "5", "--max-tokens", "5", *short])
    first = json.loads(capsys.readouterr().out)
    assert code == 0 and first["answer"] and first["method"] == method
    (tmp_path / "result.json").write_text(json.dumps(first))
    (tmp_path / "workflow.json").write_text(json.dumps(first["workflow"]))
    for file in ("result.json", "workflow.json"):
        assert complete(*read_workflow(str(tmp_path / file))) == first["workflow"]
    assert main(["--workflow", str(tmp_path / "result.json"), *short]) == 0
    again = json.loads(capsys.readouterr().out)
    for field in ("answer", "token_ids", "workers", "finish_reason", "seeds", "merge", "workflow", "branch_tokens"):
        assert again[field] == first[field], field
