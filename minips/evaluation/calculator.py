"""A calculator for untrusted expressions: Python's arithmetic syntax, read with `ast`, never `eval`; bounded in size and time."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable

LENGTH = 500  # characters of an expression
BITS = 4096  # of an integer result on the way

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculatorError(ValueError):
    """What is wrong with an expression, in a few words."""


def calculate(expression: str) -> str:
    """The value of an expression as text; raises CalculatorError. `^` is a power, 15 digits are shown of what is no integer."""
    if len(expression) > LENGTH:
        raise CalculatorError(f"the expression has {len(expression)} characters, at most {LENGTH} are read")
    text = expression.translate(_SIGNS).strip().rstrip("=").strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser comments on odd spellings such as 1if
            tree = ast.parse(text.replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except CalculatorError:
        raise
    except (SyntaxError, MemoryError, RecursionError):
        raise CalculatorError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise CalculatorError(str(error) or "not defined") from None
    if isinstance(value, list):
        raise CalculatorError("the result is a list, expected a number; write numbers without thousands separators")
    return str(value) if isinstance(value, int) else format(value, ".15g")


def _value(node: ast.AST) -> int | float | list:
    """The value of a node; lists are for the functions that take one."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Attribute) and _name(node) in _CONSTANTS:
        return _CONSTANTS[_name(node)]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_number(node.operand))
    if isinstance(node, ast.BinOp):
        return _binary(node)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_number(item) for item in node.elts]
    if isinstance(node, ast.Call) and _name(node.func) in _FUNCTIONS:
        if node.keywords:
            raise CalculatorError(f"{_name(node.func)} takes no named arguments")
        return _bounded(_FUNCTIONS[_name(node.func)](*map(_value, node.args)))
    known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
    raise CalculatorError(f"{ast.unparse(node)[:40]!r} is not known here; known: + - * / // % ^, {known}")


def _name(node: ast.AST) -> str | None:
    """The name of a function or a constant, with or without `math.` before it."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _number(node: ast.AST) -> int | float:
    value = _value(node)
    if isinstance(value, list):
        raise CalculatorError("a list stands where a number is expected; write numbers without thousands separators")
    return value


def _binary(node: ast.BinOp) -> int | float:
    left, right = _number(node.left), _number(node.right)
    if isinstance(node.op, ast.Pow):
        return _power(left, right)
    if type(node.op) not in _OPERATORS:
        raise CalculatorError(f"the operator in {ast.unparse(node)[:40]!r} is not known here; known: + - * / // % ^")
    return _bounded(_OPERATORS[type(node.op)](left, right))


def _power(base: float, exponent: float) -> int | float:
    whole = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if whole and base.bit_length() * exponent > BITS and abs(base) > 1:
        raise CalculatorError(f"{base}^{exponent} is too large" if base.bit_length() < 100 else "the power is too large")
    return _bounded(base**exponent)


def _bounded(value: object) -> int | float:
    """A number that may go on: real, finite, and not too long."""
    if isinstance(value, complex):
        raise CalculatorError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise CalculatorError(f"an integer has more than {BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculatorError("the result is too large or not defined")
    return value


def _limited(function: Callable[..., int], most: int) -> Callable[..., int]:
    """`function` on integers of at most `most`, beyond which it takes long."""

    def limited(*arguments: int) -> int:
        if any(abs(argument) > most for argument in arguments):
            raise CalculatorError(f"{function.__name__} takes integers up to {most}")
        return function(*map(_whole, arguments))

    return limited


def _whole(value: float) -> int:
    if value != int(value):
        raise CalculatorError(f"{value} is no integer")
    return int(value)


def _round(value: float, digits: int = 0) -> int | float:
    if abs(digits) > 100:
        raise CalculatorError("round takes up to 100 digits")
    return round(value, _whole(digits)) if digits else round(value)


def _mean(*values: float | list) -> float:
    numbers = _flat(*values)
    return math.fsum(numbers) / len(numbers)


def _flat(*values: float | list) -> list:
    return values[0] if len(values) == 1 and isinstance(values[0], list) else list(values)


_FUNCTIONS: dict[str, Callable] = {
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "ln": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "radians": math.radians,
    "degrees": math.degrees,
    "abs": abs,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "factorial": _limited(math.factorial, 500),
    "comb": _limited(math.comb, 1000),
    "perm": _limited(math.perm, 1000),
    "min": lambda *values: min(_flat(*values)),
    "max": lambda *values: max(_flat(*values)),
    "sum": lambda *values: sum(_flat(*values)),
    "mean": _mean,
}
