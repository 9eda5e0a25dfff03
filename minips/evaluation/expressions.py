"""The value of a mathematical expression in LaTeX or plain writing: parsed by hand, computed exactly where possible.

Nothing is ever handed to an interpreter. Length, depth and the size of every number are bounded, so that hostile input
(9^{9^{9^9}}, a thousand brackets) ends at once, as `Undefined`.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Mapping
from fractions import Fraction

MOST_TOKENS = 400
MOST_DEPTH = 40
MOST_BITS = 20_000  # of an exact number
TOLERANCE = 1e-9  # relative, where a value is not exact

Number = Fraction | complex
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega"
)
VARIABLES = {*GREEK.split(), *(name.capitalize() for name in GREEK.split()), "ell", "hbar"}
FUNCTIONS = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "asin": cmath.asin, "acos": cmath.acos, "atan": cmath.atan,
    "ln": cmath.log, "exp": cmath.exp, "log": cmath.log10, "lg": cmath.log10, "abs": abs,
}  # fmt: skip
WORDS = {*FUNCTIONS, "sqrt", "pi", "infinity", "frac", "max", "min", "floor", "ceil"}
_TOKEN = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\\[A-Za-z]+|[A-Za-z]+|\S")


class Undefined(Exception):
    """No expression, or one without a value that can be computed within the bounds."""


def tokens(text: str) -> list[str]:
    """The pieces of an expression; a run of letters that is no known word stands for a product of variables."""
    found: list[str] = []
    for token in _TOKEN.findall(text):
        if token.isalpha() and token.isascii() and token not in WORDS:
            found += token
        elif token in ("\\pi", "pi", "π"):
            found.append("π")
        else:
            found.append(token.removeprefix("\\") if token.removeprefix("\\") in WORDS else token)
    if len(found) > MOST_TOKENS:
        raise Undefined("too long")
    return found


class Parser:
    """Reads tokens into nested tuples: ("number", text), ("variable", name), ("call", name, argument), ("+", a, b) and so on."""

    def __init__(self, text: str):
        self.left = tokens(text)[::-1]
        self.depth = 0

    def parse(self) -> tuple:
        tree = self.sum()
        if self.left:
            raise Undefined(f"{self.left[-1]!r} is not expected")
        return tree

    @property
    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self, expected: str = "") -> str:
        if not self.left or (expected and self.left[-1] != expected):
            raise Undefined(f"expected {expected or 'more'}")
        return self.left.pop()

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise Undefined("too deep")
        tree = self.product()
        while self.next in ("+", "-"):
            tree = (self.take(), tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> tuple:
        if self.next in ("+", "-"):
            sign = self.take()
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise Undefined("too deep")
            tree = self.product()
            self.depth -= 1
            return ("-", ("number", "0"), tree) if sign == "-" else tree
        tree = self.power()
        while self.next and self.next not in ("+", "-", ")", "]", "}", "|", "⌋", "⌉", ","):
            operator = self.take() if self.next in ("*", "/") else ""
            if not operator and re.match(r"[\d.]", self.next) and re.match(r"[\d.]", self._last):
                raise Undefined("two numbers side by side")
            negative = bool(operator) and self.next == "-" and self.take() == "-"  # 2 * -3
            factor = self.power()
            tree = (operator or "*", tree, ("-", ("number", "0"), factor) if negative else factor)
        return tree

    _last = ""  # the last token of the factor just read

    def power(self) -> tuple:
        tree = self.primary()
        while True:
            if self.next == "!":
                self.take()
                tree = ("call", "factorial", tree)
            elif self.next == "^":
                self.take()
                tree = ("^", tree, self.argument(signed=True))
            else:
                return tree

    def argument(self, signed: bool = False) -> tuple:
        """What stands behind a command or ^: a group, or one token (one digit of a number, as in TeX, unless behind ^)."""
        if self.next == "{":
            return self.group("{", "}")
        if signed and self.next in ("+", "-"):
            sign = self.take()
            return ("-", ("number", "0"), self.argument()) if sign == "-" else self.argument()
        if not signed and re.match(r"\d.", self.next):
            number = self.take()
            self.left.append(number[1:])
            return ("number", number[0])
        return self.primary()

    def group(self, opening: str, closing: str) -> tuple:
        self.take(opening)
        tree = self.sum()
        self.take(closing)
        return tree

    def primary(self) -> tuple:
        token = self._last = self.take()
        if re.match(r"[\d.]+", token) and token != ".":
            return self.mixed(token)
        for opening, closing, name in (
            ("(", ")", ""),
            ("[", "]", ""),
            ("{", "}", ""),
            ("|", "|", "abs"),
            ("⌊", "⌋", "floor"),
            ("⌈", "⌉", "ceil"),
        ):
            if token == opening:
                tree = self.sum()
                self._last = self.take(closing)
                return ("call", name, tree) if name else tree
        if token in ("frac", "\\binom"):
            return ("/" if token == "frac" else "binom", self.argument(), self.argument())
        if token in ("sqrt", "√"):
            root = self.group("[", "]") if self.next == "[" else ("number", "2")
            return ("root", self.argument(), root)
        if token in FUNCTIONS or token in ("floor", "ceil"):
            return self.function(token)
        if token in ("π", "∞", "infinity"):
            return ("constant", "∞" if token == "infinity" else token)
        if (token.isalpha() and len(token) == 1) or token.removeprefix("\\") in VARIABLES:
            return ("variable", token + self.subscript()) if self.next == "_" else ("variable", token)
        raise Undefined(f"{token!r} is not known")

    def mixed(self, token: str) -> tuple:
        """A number; 1\\frac{4}{5} and 1 4/5 are mixed numbers where the fraction is proper."""
        if self.next == "frac" and len(self.left) > 1 and re.fullmatch(r"\d\d", self.left[-2]):
            self.left[-2:-1] = ["}", self.left[-2][1], "{", "}", self.left[-2][0], "{"]  # \frac12, in full
        whole, rest = ("number", token), self.left[::-1][:7]
        shapes = (["frac", "{", "#", "}", "{", "#", "}"], ["#", "/", "#"])
        for shape in shapes if token.isdigit() else ():
            got = rest[: len(shape)]
            if len(got) == len(shape) and all(g.isdigit() if s == "#" else g == s for g, s in zip(got, shape)):
                top, bottom = (int(g) for g, s in zip(got, shape) if s == "#")
                if top < bottom:
                    del self.left[-len(shape) :]
                    return ("+", whole, ("/", ("number", str(top)), ("number", str(bottom))))
        return whole

    def function(self, name: str) -> tuple:
        base, power = None, None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                power = self.argument(signed=True)
        inner = self.power()
        while (
            self.next and (self.next.isalpha() or self.next == "π") and self.next not in WORDS and inner[0] in ("number", "variable", "*")
        ):
            inner = ("*", inner, self.power())  # sin 2x
        tree = ("/", ("call", "ln", inner), ("call", "ln", base)) if base else ("call", name, inner)
        return ("^", tree, power) if power else tree

    def subscript(self) -> str:
        self.take("_")
        if self.next != "{":
            return "_" + self.take()
        self.take("{")
        parts = []
        while self.next != "}":
            parts.append(self.take())
        self.take("}")
        return "_" + "".join(parts)


def variables(tree: tuple) -> set[str]:
    if tree[0] == "variable":
        return set() if tree[1] in ("e", "i") else {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def value(tree: tuple, at: Mapping[str, Number] = {}) -> Number:
    """The value of a tree with its variables put in: a Fraction where it is exact, else complex. Raises Undefined."""
    try:
        result = _value(tree, at)
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise Undefined(str(error)) from None
    if isinstance(result, Fraction):
        return result
    result = complex(result)
    if not cmath.isfinite(result):
        raise Undefined("not finite")
    return result


def _value(tree: tuple, at: Mapping[str, Number]) -> Number:
    kind = tree[0]
    if kind == "number":
        if len(tree[1]) > 1000 or abs(int(tree[1].lower().partition("e")[2] or 0)) > 1000:
            raise Undefined("too large")
        return Fraction(tree[1])
    if kind == "constant":
        if tree[1] == "∞":
            raise Undefined("infinite")
        return complex(math.pi)
    if kind == "variable":
        return at[tree[1]] if tree[1] in at else {"e": complex(math.e), "i": 1j}[tree[1]]
    if kind == "call":
        return _called(tree[1], _value(tree[2], at))
    left, right = _value(tree[1], at), _value(tree[2], at)
    if kind == "^":
        return _power(left, right)
    if kind == "root":
        return _power(left, 1 / right)
    if kind == "binom":
        if not (_whole(left) and _whole(right) and 0 <= right <= 500 and abs(left) <= 10_000):
            raise Undefined("no binomial coefficient")
        return math.prod((left - k for k in range(int(right))), start=Fraction(1)) / math.factorial(int(right))
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        left, right = complex(left), complex(right)
    return _bounded(left + right if kind == "+" else left - right if kind == "-" else left * right if kind == "*" else left / right)


def _whole(number: Number) -> bool:
    return isinstance(number, Fraction) and number.denominator == 1


def _bounded(number: Number) -> Number:
    if isinstance(number, Fraction) and max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
        raise Undefined("too large")
    return number


def _called(name: str, argument: Number) -> Number:
    if name == "factorial":
        if not (_whole(argument) and 0 <= argument <= 1000):
            raise Undefined("no factorial")
        return Fraction(math.factorial(int(argument)))
    if name in ("floor", "ceil"):
        if isinstance(argument, complex):
            nearest = round(argument.real)
            argument = Fraction(nearest) if abs(argument.real - nearest) < TOLERANCE else Fraction(argument.real)
        return Fraction(math.floor(argument) if name == "floor" else math.ceil(argument))
    if name == "abs":
        return abs(argument) if isinstance(argument, Fraction) else complex(abs(argument))
    return complex(FUNCTIONS[name](complex(argument)))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and abs(exponent) * size <= MOST_BITS:
            return base ** int(exponent)
        if 2 <= exponent.denominator <= 12 and size <= 1000 and base >= 0 and abs(exponent.numerator) <= 12:
            root = Fraction(_root(base.numerator, exponent.denominator), _root(base.denominator, exponent.denominator))
            if root**exponent.denominator == base:
                return root**exponent.numerator
        if base < 0 and exponent.denominator % 2:  # the real root
            result = complex(float(-base) ** float(exponent))
            return -result if exponent.numerator % 2 else result
    return complex(base) ** complex(exponent)


def _root(number: int, degree: int) -> int:
    """The whole part of a root of a natural number."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low


def close(a: Number, b: Number, tolerance: float | None = None) -> bool:
    """Equality of two values: exact for exact ones, unless an absolute `tolerance` is given."""
    if tolerance is None and isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        a, b = complex(a), complex(b)
    except OverflowError:
        return False
    return abs(a - b) <= (tolerance if tolerance is not None else 1e-12 + TOLERANCE * max(abs(a), abs(b)))
