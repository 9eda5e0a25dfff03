"""Tests of generated code that the data gives in another form than runnable Python, or gives wrongly."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ..errors import MinipsError

# What the generated tests start with. Containers are compared exactly; numbers within `atol`, once a float stands among them.
_TOO_LARGE = [["Dog", "Cat", "CatBird", "Bird", "Fish"], 77]  # of combinations_colors: 1.7 million tuples of 77 words
_HEAD = """
from math import inf, nan, isnan


def near(out, exp, atol):
    if isinstance(exp, (list, tuple)) and isinstance(out, (list, tuple)):
        return len(out) == len(exp) and all(near(a, b, atol) for a, b in zip(out, exp))
    if not isinstance(out, (int, float, complex)) or not isinstance(exp, (int, float, complex)):
        return out == exp
    if isinstance(out, float) or isinstance(exp, float) or atol:
        return out == exp or abs(out - exp) <= (atol or 1e-6) + 1e-7 * abs(exp) or (out != out and exp != exp)
    return out == exp


def same(out, exp, atol):
    return out == exp or near(out, exp, atol)

"""
_CHECKS = {
    "value": "same(out, exp, ATOL)",
    "set": "set(out) == set(exp)",
    "truth": "(out if isinstance(out, bool) else out is not None) == (exp if isinstance(exp, bool) else exp is not None)",
    "root": "abs(expected['poly'](inp[0], out)) <= ATOL",
}


def tests_from_inputs(row: Mapping) -> str:
    """Python tests of a row that has inputs and a canonical solution instead of tests (HumanEval+ Mini form, MBPP+).

    row: prompt, canonical_solution, entry_point, base_input, plus_input, atol, and (MBPP+) assertion, from which the types that
    JSON lost (tuples, sets, complex numbers) and the kind of comparison are taken. The expected outputs are computed by the
    tests themselves, in the process that the code under test cannot see. Raises MinipsError naming a missing field.
    """
    for name in ("prompt", "canonical_solution", "entry_point", "base_input", "plus_input"):
        if name not in row:
            raise MinipsError(f"the row {row.get('task_id', '')} has no field {name}, expected inputs and a canonical solution")
    entry, shown = row["entry_point"], _calls(row.get("assertion", ""), row["entry_point"])
    kind = "root" if entry == "find_zero" else _comparison(row.get("assertion", ""), entry)
    inputs = [
        [_number(arg, shown, at) for at, arg in enumerate(_as_shown(args, shown))]
        for args in [*row["base_input"], *(row["plus_input"] or ())]
        if args != _TOO_LARGE
    ]
    lines = [
        f"expected = {{}}\nexec({row['prompt'] + row['canonical_solution']!r}, expected)",
        f"inputs = {inputs!r}\n",
        "for inp in inputs:",
        f"    exp = expected[{entry!r}](*copy.deepcopy(inp))",
        f"    out = {entry}(*inp)",
        f"    assert {_CHECKS[kind].replace('ATOL', repr(row.get('atol') or 0))}, f'{{inp!r}}: {{out!r}}, expected {{exp!r}}'[:300]",
    ]
    return "import copy" + _HEAD + "\n".join(lines) + "\n"


def mended(tests: str) -> str:
    """Published tests without three known mistakes.

    HumanEval/32 unpacks find_zero's root instead of putting it into the polynomial, so that no answer passes. Mbpp/255 has one
    input with a result of 128 million words, several gigabytes in each process that looks at it. Mbpp/737, 787 and 794 compute
    whether the result is right, and then do not assert it.
    """
    tests = tests.replace("assert _poly(*candidate(*inp), inp) <= 0.0001", "assert abs(_poly(*inp, candidate(*inp))) <= 0.0001")
    found = "        exact_match = exp == (out is not None)\n"
    tests = tests.replace(found, f"{found}    assert exact_match\n")
    return tests.replace(f"{_TOO_LARGE}, ".replace('"', "'"), "")


def _calls(assertion: str, entry: str) -> list[list]:
    """The literal arguments of each call of the function in the shown assertions."""
    shown = []
    for node in ast.walk(ast.parse(assertion)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == entry:
            try:
                shown.append([ast.literal_eval(arg) for arg in node.args])
            except ValueError:
                continue
    return shown


def _comparison(assertion: str, entry: str) -> str:
    """How the shown assertions compare: set(...) == set(...), the truth of the result, or its value."""
    tests = [node.test for node in ast.walk(ast.parse(assertion)) if isinstance(node, ast.Assert)]
    if tests and all(isinstance(t, ast.Compare) and ast.unparse(t.left).startswith(f"set({entry}(") for t in tests):
        return "set"
    plain = [t.operand if isinstance(t, ast.UnaryOp) else t for t in tests]
    if tests and all(isinstance(t, ast.Call) for t in plain):
        return "truth"
    return "value"


def _number(argument, shown: list[list], at: int):
    """An argument that JSON holds as text although the shown calls have a number there (complex ones)."""
    examples = [args[at] for args in shown if at < len(args)]
    if isinstance(argument, str) and examples and all(isinstance(example, (int, float, complex)) for example in examples):
        for kind in (float, complex):
            try:
                return kind(argument)
            except ValueError:
                continue
    return argument


def _as_shown(value, shown: list):
    """The value with lists turned into the tuples or sets that stand at the same place in the shown examples."""
    if not isinstance(value, list):
        return value
    containers = [example for example in shown if isinstance(example, (list, tuple, set))]
    items = []
    for at, item in enumerate(value):
        if containers and all(isinstance(c, (list, tuple)) and len(c) == len(value) for c in containers):
            like = [c[at] for c in containers]
        else:
            like = [part for c in containers for part in c]
        if isinstance(item, list) and not any(isinstance(part, (list, tuple, set)) for part in like):
            like = containers  # deeper than shown: as the level above
        items.append(_as_shown(item, like))
    kinds = set(map(type, containers))
    return tuple(items) if kinds == {tuple} else set(items) if kinds == {set} else items
