"""Tools of multi-turn workers: the calculator, the file reader, arguments, the SQL tool's refusals, and which example has which."""

import contextlib
import itertools
import os
import sys
import time
from datetime import date
from types import SimpleNamespace

import pytest

from minips import MinipsError
from minips.evaluation import postgres
from minips.evaluation.calculator import CalculatorError, calculate
from minips.evaluation.example import Example
from minips.evaluation.tools import FILE_CHARACTERS, Call, Tool, Toolbox, agent_system, calculator, read_file, tool_prompt, toolboxes, view


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("1 + 2 * 3", "7"),
        ("(3 + 4) * sqrt(2)", "9.89949493661167"),
        ("2^10", "1024"),
        ("2 ** 0.5 ** 2", "1.18920711500272"),
        ("-3^2", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("7 // 2 + 7 % 4", "6"),
        ("12 × 3 ÷ 4 − 1 =", "8"),
        ("math.sqrt(16) + math.pi * 0", "4"),
        ("comb(10, 3) + factorial(5) + gcd(12, 18)", "246"),
        ("round(2.71828, 2)", "2.72"),
        ("max([3, 9, 4]) - min(3, 9)", "6"),
        ("mean(1, 2, 3, 4)", "2.5"),
        ("3^1000 // 3^998", "9"),
        ("1e3", "1000"),
        ("  5 ", "5"),
    ],
)
def test_calculator(expression, expected):
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    "expression, message",
    [
        ("", "no arithmetic"),
        ("2 +", "no arithmetic"),
        ("1 / 0", "division by zero"),
        ("1,000 + 1", "thousands separators"),
        ("1,000", "thousands separators"),
        ("__import__('os').system('true')", "not known"),
        ("(1).__class__", "not known"),
        ("[x for x in (1, 2)]", "not known"),
        ("sqrt(x)", "'x' is not known"),
        ("'a' * 9", "not known"),
        ("True + 1", "not known"),
        ("1 << 9", "the operator"),
        ("1 < 2", "not known"),
        ("(-8) ^ (1/3)", "not a real number"),
        ("sqrt(-1)", "error"),
        ("10^10^10", "too large"),
        ("9^9^9^9", "too large"),
        ("1e308 * 10", "too large"),
        ("2.0 ^ 5000", "error"),
        ("factorial(10^7)", "up to 500"),
        ("factorial(2.5)", "no integer"),
        ("comb(10^9, 5 * 10^8)", "up to 1000"),
        ("round(5, -10^9)", "up to 100"),
        ("sqrt(1, 2)", "error"),
        ("sqrt(x=1)", "named"),
        ("gcd(1.5, 2)", "error"),
        ("max()", "error"),
        ("sqrt([1])", "error"),
        ("min([1, 2], 3)", "error"),
        ("-" * 400 + "1", None),
        ("(" * 300 + "1" + ")" * 100, "no arithmetic"),
        ("1" * 501, "501 characters"),
        ("9" * 499 + "*9" * 0, None),
        ("1\0", "no arithmetic"),
        ("2 ^ -1 ^ 9999999", None),
    ],
)
def test_calculator_refuses_or_answers_at_once(expression, message):
    started = time.perf_counter()
    result = Toolbox((calculator(),)).run(Call("calculator", {"expression": expression}))
    assert time.perf_counter() - started < 0.5
    if message is not None:
        assert result.startswith("error: ") and "\n" not in result and message in result
    else:
        assert result.startswith("error: ") or float(result)


def test_calculator_products_stay_bounded():
    text = "*".join(["9^1000"] * 60)
    with pytest.raises(CalculatorError, match="4096 bits"):
        calculate(text)


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "notes.txt").write_text("first line\nsecond line: 42 ä\n")
    (inside / "sub" / "deep.csv").write_bytes(b"\xef\xbb\xbfa,b\n1,2\n")
    (inside / "latin.txt").write_bytes("déjà vu ".encode("latin-1") * 3)
    (inside / "empty.txt").write_text("")
    (inside / "picture.png").write_bytes(b"\x89PNG\r\n\0\0binary")
    (inside / "big.txt").write_text("a" + "ä" * 40_000)
    (tmp_path / "secret.txt").write_text("secret")
    (inside / "out").symlink_to(tmp_path / "secret.txt")
    (inside / "updir").symlink_to(tmp_path)
    (inside / "near").symlink_to(inside / "notes.txt")
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe")
    (tmp_path / "inside-too").mkdir()
    (tmp_path / "inside-too" / "x.txt").write_text("secret")
    return inside


def read(folder, path, **arguments):
    return Toolbox((read_file(folder),)).run(Call("read_file", {"path": path, **arguments}))


def test_files_below_the_folder_are_read(folder):
    assert read(folder, "notes.txt") == "first line\nsecond line: 42 ä\n"
    assert read(folder, "./sub/../near") == read(folder, str(folder / "notes.txt")) == read(folder, "notes.txt")
    assert read(folder, "sub/deep.csv") == "a,b\n1,2\n"  # without the mark in front
    assert read(folder, "latin.txt") == "déjà vu " * 3
    assert read(folder, "empty.txt") == "(empty)"
    assert read(folder, ".").splitlines()[0] == "big.txt" and "sub/" in read(folder, ".")


@pytest.mark.parametrize(
    "path, message",
    [
        ("../secret.txt", "outside"),
        ("out", "outside"),
        ("updir/secret.txt", "outside"),
        ("updir", "outside"),
        ("../inside-too/x.txt", "outside"),
        ("/etc/passwd", "outside"),
        ("/dev/zero", "outside"),
        ("pipe", "no plain file"),
        ("picture.png", "binary file of 14 bytes"),
        ("missing.txt", "does not exist"),
        ("loop", "does not exist"),
        ("notes.txt/x", "does not exist"),
        ("no\0tes", "does not exist"),
        ("\ud800", "does not exist"),
        ("x" * 5000, "does not exist"),
    ],
)
def test_no_way_out_of_the_folder(folder, path, message):
    result = read(folder, path)
    assert result.startswith("error: read_file: ") and message in result and "secret\n" not in result and len(result) < 200


def test_big_files_come_in_parts_that_join(folder):
    text, start = "", 0
    while True:
        part = read(folder, "big.txt", start=start)
        assert len(part) <= FILE_CHARACTERS + 100
        body, _, mark = part.partition("\n(bytes ")
        text += body
        if not mark:
            break
        start = int(mark.split("go on with start ")[1].rstrip(")"))
    assert text == "a" + "ä" * 40_000
    assert "expected 0 to 80001" in read(folder, "big.txt", start=80_002)


def test_a_device_given_by_a_link_inside_is_not_read(tmp_path):
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert "outside" in read(tmp_path, "zero") and "no plain file" in read("/dev", "zero")


SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "part": {"type": "number"}, "flag": {"type": "boolean"}},
    "required": ["text"],
}
BOX = Toolbox((Tool("echo", "", SCHEMA, lambda arguments: repr(dict(sorted(arguments.items())))), view({"a": "A view", "b": "B"})))


@pytest.mark.parametrize(
    "call, result",
    [
        (Call("echo", {"text": "x", "count": "3", "part": "2.5", "flag": "True"}), "{'count': 3, 'flag': True, 'part': 2.5, 'text': 'x'}"),
        (Call("echo", {"text": 5, "count": 3.0, "part": None}), "{'count': 3, 'text': '5'}"),
        (Call("echo", {}), "error: echo: argument 'text' is missing"),
        (Call("echo", {"text": "x", "more": 1}), "error: echo: argument 'more' is unknown; arguments: text, count, part, flag"),
        (Call("echo", {"text": ["x"]}), "error: echo: argument 'text' is ['x'], expected type string"),
        (Call("echo", {"text": "x", "count": "many"}), "error: echo: argument 'count' is 'many', expected type integer"),
        (Call("echo", {"text": "x", "count": True}), "error: echo: argument 'count' is True, expected type integer"),
        (Call("echo", {"text": "x", "flag": 1}), "error: echo: argument 'flag' is 1, expected type boolean"),
        (Call("view", {"name": "c"}), "error: view: argument 'name' is 'c', expected one of a, b"),
        (Call("view", {"name": "a"}), "A view"),
        (Call("other", {}), "error: there is no tool 'other'; tools: echo, view"),
        (Call("", {}, "the call is not valid JSON"), "error: the call is not valid JSON"),
    ],
)
def test_arguments_are_checked_against_the_schema(call, result):
    assert BOX.run(call) == result


def test_a_tool_that_raises_gives_an_error_line():
    def broken(arguments):
        raise RuntimeError("two\nlines")

    box = Toolbox((Tool("broken", "", {"type": "object", "properties": {}}, broken),))
    assert box.run(Call("broken", {})) == "error: broken: two lines"


def test_what_no_model_can_mend_ends_the_run():
    def gone(arguments):
        raise MinipsError("MINIPS_DSN: the database cannot be reached")

    with pytest.raises(MinipsError, match="cannot be reached"):
        Toolbox((Tool("query", "", {"type": "object", "properties": {}}, gone),)).run(Call("query", {}))


def test_the_prompt_names_every_tool_and_the_day():
    text = agent_system(BOX, date(2025, 3, 4))
    assert tool_prompt(BOX) in text and "Today is 4 March 2025." in text and "Today" not in agent_system(BOX)
    assert all(f'"name": "{name}"' in text for name in ("echo", "view")) and "<tool_call>" in text


def example(**meta):
    return Example("7", "q", "t", "u", ("a",), "a", meta=meta)


def test_toolboxes_by_example(folder, monkeypatch):
    names = [[tool.name for tool in box.tools] for box in toolboxes(example(folder=str(folder)), 2)]
    assert names == [["calculator", "read_file"]] * 2
    assert [tool.name for tool in toolboxes(example(), 1)[0].tools] == ["calculator"]
    assert [tool.name for tool in toolboxes(example(folder=str(folder), file_name=""), 1)[0].tools] == ["calculator"]
    [box] = toolboxes(example(folder=str(folder), file_name="notes.txt"), 1)  # the other files are other rows' or hold the answers
    assert box.run(Call("read_file", {"path": "./notes.txt"})).startswith("first line") and "notes.txt" in tool_prompt(box)
    for path in ("big.txt", ".", "sub/deep.csv", "sub/../big.txt", "near"):
        assert box.run(Call("read_file", {"path": path})).startswith("error: read_file: ")
    boxes = toolboxes(example(views={"a": "A", "b": "B"}, dealt=[["b"], ["a"]], root_causes=["X"]), 2)
    assert [box.run(box.first_call) for box in boxes] == ["B", "A"]
    monkeypatch.delenv(postgres.DSN, raising=False)
    with pytest.raises(MinipsError, match="set MINIPS_DSN.*database_synthetic needs none and runs everywhere"):
        toolboxes(example(root_causes=["X"]), 2)


def test_a_database_needs_psycopg_and_may_be_one_a_row(monkeypatch):
    monkeypatch.setenv(postgres.DSN, "host=h dbname=incident_{id}")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MinipsError, match=r"needs the package psycopg: pip install 'psycopg\[binary\]'"):
        postgres.dsn_for("7")
    monkeypatch.setitem(sys.modules, "psycopg", database())
    assert postgres.dsn_for("7") == "host=h dbname=incident_7"
    monkeypatch.setitem(sys.modules, "psycopg", database(superuser=True))
    with pytest.raises(MinipsError, match="its role is a superuser, expected one that only reads"):
        postgres.dsn_for("7")
    monkeypatch.setitem(sys.modules, "psycopg", database(fault="no such host"))
    with pytest.raises(MinipsError, match="cannot be reached .*no such host"):
        postgres.dsn_for("7")


def database(rows=(), superuser=False, fault=""):
    """Stands in for psycopg: one connection, one statement's rows."""

    class Connection(SimpleNamespace):
        def execute(self, sql):
            return SimpleNamespace(fetchone=lambda: (superuser,))

        def cursor(self):
            assert self.read_only
            return contextlib.nullcontext(SimpleNamespace(description=[SimpleNamespace(name="a")], stream=lambda sql: iter(rows)))

        def close(self):
            pass

    def connect(dsn, **options):
        assert "statement_timeout=" in options["options"]
        if fault:
            raise RuntimeError(fault)
        return Connection(read_only=False)

    return SimpleNamespace(connect=connect, Error=RuntimeError)


def test_rows_of_a_query_are_capped(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", database([(None,), ("x\ny",), ("z" * 999,)]))
    lines = postgres.run_query("host=h", "SELECT a FROM t").splitlines()
    assert lines[:3] == ["a", "", "x y"] and len(lines[3]) == postgres.CELL and lines[4] == "(3 rows)"
    endless = itertools.repeat((1,))
    monkeypatch.setitem(sys.modules, "psycopg", database(endless))
    lines = postgres.run_query("host=h", "/* why */ (select 1)").splitlines()
    assert lines == ["a", *["1"] * postgres.ROWS, "(the first 50 rows; there are more)"]


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE x",
        "-- SELECT\nDELETE FROM x",
        "/* SELECT */ COPY x TO PROGRAM 'sh'",
        "  SET role postgres",
        "",
        "1",
        "(((",
        "VACUUM",
        "DO $$ $$",
    ],
)
def test_only_reading_statements_reach_the_database(sql, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)  # nothing is asked for it
    assert postgres.run_query("host=nowhere", sql).startswith("error: ")
