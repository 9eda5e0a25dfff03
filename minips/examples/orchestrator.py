"""A fan-out/fan-in graph in plain Python, twice: its synthesis node reads the workers' caches, or their text again.

    python -m minips.examples.orchestrator [TASK]

A node is a function from the state to what it adds to it. The two graphs differ in one call: `generate(text=...)` reads all that
the workers wrote a second time; `generate_from_caches(kv_list=...)` goes on from what they have computed already.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.chat import text_prompt

TASK = "How can a small town get more people to ride a bicycle?"
ROLES = ("Think about safe roads.", "Think about money and prices.", "Think about schools and children.")
PROMPT = "Using the findings above, answer in one short paragraph: "
WORKER = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, seed=3)
ANSWER = SamplingParams(max_tokens=64, repetition_penalty=1.05)

State = dict[str, object]
Node = Callable[[State], State]


def run_graph(nodes: Sequence[Node], state: State) -> State:
    """Run the nodes in order, each on what the ones before have put into the state."""
    for node in nodes:
        state = {**state, **node(state)}
    return state


def nodes_of(engine: Engine, synthesizer: Synthesizer) -> dict[str, Node]:
    """The graph's nodes by name, on one engine."""

    def plan(state: State) -> State:
        return {"roles": list(ROLES)}

    def fan_out(state: State) -> State:
        with engine.prefill(state["task"]) as prefix:  # read once, shared by all workers
            return {"branches": engine.decode(engine.fork(prefix, state["roles"]), WORKER)}

    def synthesize_text(state: State) -> State:
        texts = [branch.text for branch in state["branches"]]
        asked = text_prompt(state["task"], texts, PROMPT + state["task"])
        return {"text": synthesizer.generate(text=asked, params=ANSWER)}

    def synthesize_caches(state: State) -> State:
        return {"caches": synthesizer.generate_from_caches(kv_list=state["branches"], prompt=PROMPT + state["task"], params=ANSWER)}

    return {node.__name__: node for node in (plan, fan_out, synthesize_text, synthesize_caches)}


def orchestrate(engine: Engine, task: str = TASK, adapter: str | None = None) -> State:
    """Both graphs on the same workers -> the state, with the results `text` and `caches`. The text goes first: caches are consumed."""
    nodes = nodes_of(engine, Synthesizer(engine, adapter))
    state = run_graph([nodes["plan"], nodes["fan_out"]], {"task": task})
    try:
        state = run_graph([nodes["synthesize_text"]], state)
        return run_graph([nodes["synthesize_caches"]], state)
    finally:
        for branch in state["branches"]:
            branch.close()


def report(state: State) -> str:
    """Both answers, each with the time to its first token."""
    parts = []
    for name, title in (("text", "generate(text=...)"), ("caches", "generate_from_caches(kv_list=...)")):
        result = state[name]
        head = f"{title}: first token after {result.ttft * 1000:.0f} ms, {result.prefilled_tokens} tokens prefilled"
        parts.append(f"{head}, {result.reused_tokens} read from the cache\n{result.text.strip()}")
    return "\n\n".join(parts)


def arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("task", metavar="TASK", nargs="?", default=TASK, help="default: %(default)s")
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or hub id (default: %(default)s)")
    parser.add_argument("--adapter", metavar="NAME", help="mapper and LoRA of the synthesizer (default: base weights)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("The same fan-out/fan-in graph with text and with caches.", argv)
    try:
        print(report(orchestrate(Engine.from_pretrained(args.model, progress=True), args.task, args.adapter)))
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminips: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
