"""The graph of `orchestrator` inside LangGraph: workers fan out with Send, their branches travel through the graph's state.

    python -m minips.examples.langgraph_orchestrator [TASK]          (needs: pip install langgraph)

Each worker node forks its branch from the shared prefix, in whatever order the framework runs it; the reducer keeps the branches in
the order of their numbers. The fan-in node decodes them all as rows of one batch, which is what makes workers cheap, and the
synthesis node is one call of `generate_from_caches`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Annotated, TypedDict

from minips import Engine, MinipsError, Synthesizer
from minips.examples.orchestrator import ANSWER, PROMPT, ROLES, TASK, WORKER, arguments
from minips.kv_cache import Branch
from minips.results import Result


def in_order(left: list[tuple[int, Branch]], right: list[tuple[int, Branch]]) -> list[tuple[int, Branch]]:
    """Reducer: the branches of both lists by their number, whichever came first."""
    return sorted([*left, *right], key=lambda item: item[0])


class State(TypedDict, total=False):
    """What travels through the graph. Branches are handles: their K/V stays in the engine's pages."""

    task: str
    prefix: Branch
    branches: Annotated[list[tuple[int, Branch]], in_order]
    result: Result


def build_graph(engine: Engine, synthesizer: Synthesizer, roles: Sequence[str] = ROLES):
    """The compiled graph: read -> one worker a role -> decode -> synthesize. MinipsError where LangGraph is missing."""
    try:
        from langgraph.graph import END, START, StateGraph
        from langgraph.types import Send
    except ImportError:
        raise MinipsError("this example needs LangGraph: pip install langgraph") from None
    alone = threading.Lock()  # LangGraph runs the worker nodes in threads, and one thread at a time may use an engine

    def read(state: State) -> State:
        return {"prefix": engine.prefill(state["task"])}

    def fan_out(state: State) -> list:
        return [Send("worker", {"number": number, "role": role, "prefix": state["prefix"]}) for number, role in enumerate(roles)]

    def worker(sent: dict) -> State:
        with alone:
            (branch,) = engine.fork(sent["prefix"], [sent["role"]])
        return {"branches": [(sent["number"], branch)]}

    def decode(state: State) -> State:
        engine.decode([branch for _, branch in state["branches"]], WORKER)
        return {}

    def synthesize(state: State) -> State:
        branches = [branch for _, branch in state["branches"]]
        return {"result": synthesizer.generate_from_caches(kv_list=branches, prompt=PROMPT + state["task"], params=ANSWER)}

    graph = StateGraph(State)
    for node in (read, worker, decode, synthesize):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "read")
    graph.add_conditional_edges("read", fan_out, ["worker"])
    graph.add_edge("worker", "decode")
    graph.add_edge("decode", "synthesize")
    graph.add_edge("synthesize", END)
    return graph.compile()


def orchestrate(engine: Engine, task: str = TASK, adapter: str | None = None) -> State:
    """Run the graph -> its last state, with the `result`. No branch is left open."""
    graph = build_graph(engine, Synthesizer(engine, adapter))
    opened = set(engine.pool.branches)
    try:
        return graph.invoke({"task": task, "branches": []})
    finally:
        for branch in set(engine.pool.branches) - opened:
            branch.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("The fan-out/fan-in graph inside LangGraph, with branches in its state.", argv)
    try:
        result = orchestrate(Engine.from_pretrained(args.model, progress=True), args.task, args.adapter)["result"]
        print(f"{result.text.strip()}\n(first token after {result.ttft * 1000:.0f} ms, {result.reused_tokens} tokens read from the cache)")
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminips: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
