"""Do the published solutions of HumanEval+ and MBPP+ pass our runner, and does a wrong answer fail?

    python bench/canonical.py --data DIR [--rows N]

Each answer goes through the task's own scoring: extraction, sandbox, tests. The wrong answer returns None everywhere.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path

from minips import MinipsError
from minips.evaluation.sandbox import missing_isolation
from minips.evaluation.tasks import select, task

TASKS = ("humanevalplus", "mbppplus")


def without_content(answer: str) -> str:
    """The same functions, each returning None."""
    code = answer.partition("```python\n")[2].rpartition("```")[0]
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [ast.Return(ast.Constant(None))]
    return f"```python\n{ast.unparse(ast.fix_missing_locations(tree))}\n```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="of each task (default: all)")
    args = parser.parse_args()
    missing, failed = missing_isolation(), 0
    print(f"sandbox: {'without ' + ', '.join(missing) if missing else 'every guard holds'}")
    try:
        for name in TASKS:
            chosen, started, passed = task(name), time.perf_counter(), []
            examples = select(chosen.load(args.data, 1, 0), args.rows, 0)
            for example in examples:
                if chosen.score(example.target, example, "minips")["accuracy"] == 1:
                    passed.append(example.id)
                else:
                    failed += 1
                    print(f"  {example.id}: the published solution fails")
            seconds = time.perf_counter() - started
            wrong = [e.id for e in examples[:50] if chosen.score(without_content(e.target), e, "minips")["accuracy"] == 1]
            failed += len(wrong)
            print(f"{name}: {len(passed)} of {len(examples)} published solutions pass, {seconds / len(examples):.2f} s each; ", end="")
            print(f"{len(wrong)} of {min(50, len(examples))} empty ones do {wrong or ''}")
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
