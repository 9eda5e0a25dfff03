"""The screen: what stands on a terminal (played by a small emulator), in a file and in a pipe; widths; nothing raw from a model."""

import io
import os
import re
import subprocess
import sys

import pytest

from minips import screen as screens
from minips.screen import Screen, clean, clusters, fit, one_line, open_screen, width_of
from minips.screen_live import LiveScreen

FAMILY, HEART, THUMB, FLAGS = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2764\ufe0f",
    "\U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
)
SUMMER = "\u6771\u4eac\u306e\u590f"
EVIL = "a\x1b[2J\x1b]0;title\x07\rb\x9b5A\x00c\u202ed\te\u2028f"


class Terminal(io.StringIO):
    """A stream that is a terminal of a given size and plays what is written: `rows` are the lines that have been seen so far."""

    encoding = "utf-8"

    def __init__(self, columns=80, height=24):
        super().__init__()
        self.columns, self.height = columns, height
        self.rows, self.x, self.y, self.cursor, self.wrap = [[]], 0, 0, True, True
        self.raw = ""

    def isatty(self):
        return True

    def write(self, text):
        self.raw += text
        for sequence, plain in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|([^\x1b]+)", text):
            self.control(sequence) if sequence else self.put(plain)
        return len(text)

    def put(self, text):
        for cluster, width in clusters(text):
            if cluster == "\n":
                self.x, self.y = 0, self.y + 1
                self.rows += [[] for _ in range(self.y + 1 - len(self.rows))]
            elif cluster == "\r":
                self.x = 0
            else:
                assert cluster >= " ", repr(text)
                if self.x + width > self.columns:
                    assert self.wrap, f"a line of a frame is too wide: {text!r}"
                    self.put("\n")
                row = self.rows[self.y]
                row += [" "] * (self.x + width - len(row))
                row[self.x : self.x + width] = [cluster, *[""] * (width - 1)]
                self.x += width

    def control(self, sequence):
        body, kind = sequence[2:-1], sequence[-1]
        if kind == "A":
            assert int(body) < self.height, "moves above the screen"
            self.y -= int(body)
        elif kind == "C":
            self.x += 1
        elif kind == "K":
            del self.rows[self.y][0 if body == "2" else self.x :]
        elif kind == "J":
            del self.rows[self.y][self.x :]
            del self.rows[self.y + 1 :]
        elif body == "?25":
            self.cursor = kind == "h"
        elif body == "?7":
            self.wrap = kind == "h"
        else:
            assert kind == "m", sequence

    @property
    def lines(self):
        return ["".join(row).rstrip() for row in self.rows]


@pytest.fixture
def sizes(monkeypatch):
    """Terminals tell their own size; frames are drawn for every token."""
    monkeypatch.setattr(screens, "terminal_size", lambda stream: (stream.columns, stream.height))
    monkeypatch.setattr("minips.screen_live.terminal_size", lambda stream: (stream.columns, stream.height))
    monkeypatch.setattr("minips.screen_live.FRAME_SECONDS", 0.0)


def feed(screen, texts, steps=12, stops=None):
    """Workers that write their texts over and over; `stops` gives the step at which one stops."""
    screen.start_workers([f"worker {index + 1}" for index in range(len(texts))], [steps] * len(texts))
    for step in range(steps):
        for index, text in enumerate(texts):
            end = (stops or {}).get(index, steps)
            if step <= end:
                screen.worker_token(index, 7 if step < end else None, text)
    for index, text in enumerate(texts):
        screen.worker_end(index, "stop" if index in (stops or {}) else "length", steps, text * steps)


# Widths


@pytest.mark.parametrize(
    "text, expected",
    [
        ("abc", ["a", "b", "c"]),
        (SUMMER, list(SUMMER)),
        (f"x{FAMILY}y", ["x", FAMILY, "y"]),
        (HEART + THUMB, [HEART, THUMB]),
        (FLAGS, [FLAGS[:2], FLAGS[2:]]),
        (FLAGS[:3], [FLAGS[:2], FLAGS[2]]),
        ("e\u0301a\u0300\u0323", ["e\u0301", "a\u0300\u0323"]),
        ("\u1112\u1161\u11ab\u1100", ["\u1112\u1161\u11ab", "\u1100"]),
        ("\u0301a", ["\u0301", "a"]),
    ],
)
def test_clusters_are_what_a_reader_takes_for_a_character(text, expected):
    assert [cluster for cluster, _ in clusters(text)] == expected
    assert sum(width for _, width in clusters(text)) == width_of(text)


@pytest.mark.parametrize("text", ["plain words, many of them", SUMMER * 5, FAMILY * 4, (HEART + THUMB + FLAGS) * 3, "e\u0301" * 30, ""])
@pytest.mark.parametrize("tail", [False, True])
def test_fit_keeps_to_the_width_and_cuts_no_character(text, tail):
    whole = [cluster for cluster, _ in clusters(text)]
    for columns in range(40):
        found = fit(text, columns, tail)
        assert width_of(found) <= columns
        if found != text and columns > 3:
            kept = found.removeprefix("...") if tail else found.removesuffix("...")
            pieces = [cluster for cluster, _ in clusters(kept)]
            assert pieces == (whole[len(whole) - len(pieces) :] if tail else whole[: len(pieces)])
            lost = whole[-len(pieces) - 1] if tail else whole[len(pieces)]
            assert width_of(found) + width_of(lost) > columns  # no more would have fitted
    assert fit(text, 1000, tail) == text


def test_cleaned_text():
    assert clean(EVIL + "\n") == "a[2J]0;titleb5Ac\u202ed\te\u2028f\n"
    assert one_line(EVIL + "\n x ") == "a[2J]0;title b5Acd e f x" and one_line(f" {FAMILY}\u3000{SUMMER} ") == f"{FAMILY} {SUMMER}"


# On a terminal


@pytest.mark.parametrize("columns", [6, 12, 40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_worker_lines_update_in_place(sizes, columns, colour):
    terminal, texts = Terminal(columns), ["word ", SUMMER, FAMILY + HEART + THUMB + FLAGS, EVIL]
    with LiveScreen(terminal, terminal, colour=colour) as screen:
        screen.note("hi")
        screen.start_workers(["a", SUMMER * 20, "b", "c" * 50], [5] * 4)
        assert terminal.lines[0] == "hi" and len(terminal.lines) == 6
        assert columns < 40 or all("  waiting  0/5 tokens" in line for line in terminal.lines[1:5])
        feed(screen, texts, stops={1: 3})
        shown = terminal.lines[1:]
        assert len(shown) == 5 and (terminal.x, terminal.y) == (0, 1) and terminal.cursor and terminal.wrap
        if columns >= 80:
            expected = (("length", 12, "word"), ("stop", 3, SUMMER[-2:]), ("length", 12, FLAGS), ("length", 12, "e f"))
            for line, (state, tokens, end) in zip(shown, expected):
                assert f"  {state} " in line and f" {tokens}/12 tokens " in line and line.endswith(end)
            assert "together 39 tokens after" in shown[-1]
        screen.end_workers()
        assert not any("/12 tokens" in line for line in terminal.lines)  # the frame is gone
        screen.start_answer("reading")
        for piece in ("It is\x1b[5A ", "so.\x07"):
            screen.answer(piece)
        screen.end_answer("figures")
    assert bool(re.search(r"\x1b\[[\d;]*m", terminal.raw)) == colour
    if columns >= 80:
        lines = terminal.lines
        assert [line[:11] for line in lines[1:5]] == [f"  worker {i}:" for i in range(1, 5)] and "  together 48 tokens in" in lines[5]
        assert lines[2].startswith("  worker 2: 12 tokens (stop)  " + SUMMER[: (columns - 34) // 2])
        assert lines[6:] == ["reading", "It is[5A so.", "figures", ""]


@pytest.mark.parametrize("height", [1, 2, 3, 10, 24])
def test_more_workers_than_rows(sizes, height):
    terminal = Terminal(80, height)
    with LiveScreen(terminal, terminal) as screen:
        feed(screen, ["x "] * 40, steps=4, stops={39: 2})
        lines = terminal.lines
        assert len(lines) <= height and (terminal.x, terminal.y) == (0, 0)
        if height >= 3:
            hidden = 40 - (len(lines) - 2)
            assert lines[-2] == f"  and {hidden} more, 0 of them not done" and "together 158 tokens" in lines[-1]
        terminal.height = 24  # the window has grown
        screen.end_workers()
    assert len(terminal.lines) == 42 and terminal.lines[-1] == ""


def test_a_resized_terminal(sizes):
    terminal = Terminal(200)
    with LiveScreen(terminal, terminal, colour=False) as screen:
        feed(screen, ["many words ", SUMMER])
        for columns in (60, 30, 120):
            terminal.columns, before = columns, len(terminal.raw)
            feed(screen, ["many words ", SUMMER])
            assert len(terminal.lines) == 3 and all(width_of(line) < columns for line in terminal.lines)
            assert "\x1b[2K" in terminal.raw[before:]
        before = len(terminal.raw)
        feed(screen, ["many words "])
        assert "\x1b[2K" not in terminal.raw[before:]  # nothing is erased first while the size stays: no flicker


def test_notes_errors_and_interrupts_leave_clean_lines(sizes):
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), LiveScreen(terminal, terminal, colour=False) as screen:
        feed(screen, ["a ", "b "])
        screen.say("minips: error: odd \x1b[31m")
        screen.worker_token(0, 7, "more")
        assert terminal.lines[0] == "minips: error: odd [31m" and len(terminal.lines) == 4
        terminal.write("^C")  # a terminal echoes the key
        raise KeyboardInterrupt
    assert terminal.lines == ["minips: error: odd [31m", ""] and terminal.cursor and terminal.wrap
    with pytest.raises(KeyboardInterrupt), LiveScreen(terminal, terminal, colour=False) as screen:
        screen.answer("half an ans")
        raise KeyboardInterrupt
    assert terminal.lines[1:] == ["half an ans", ""]


def test_frames_are_throttled(sizes, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("minips.screen_live.FRAME_SECONDS", 0.12)
    terminal = Terminal()
    screen = LiveScreen(terminal, terminal)
    screen.start_workers(["a", "b"], [9999, 9999])
    for _ in range(2000):
        now[0] += 0.005
        screen.worker_token(0, 7, "a")
        screen.worker_token(1, 7, "b")
    frames = terminal.raw.count("\x1b[?25l")
    assert 8 * 10 * 0.9 <= frames <= 10 * 10  # of 10 seconds
    assert " 200.0/s" in terminal.lines[0]


# In a file, in a pipe, or nowhere


def test_plain_lines_and_signs_of_life(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    out, err = io.StringIO(), io.StringIO()
    with open_screen(stdout=out, stderr=err) as screen:
        assert type(screen) is Screen
        screen.start_workers(["worker 1", "worker 2"], [40, 40])
        for _ in range(12):
            now[0] += 1
            screen.worker_token(0, 7, "x")
        screen.worker_token(1, None, "")
        screen.worker_end(0, "length", 12, "long words \n" * 40)
        screen.worker_end(1, "stop", 1, "\u3042\ufffd")
        screen.end_workers()
        screen.start_answer("synthesizer: reading 12 tokens from 2 caches")
        screen.answer("one\x1b[2J ")
        screen.answer("two\n")
        screen.end_answer("figures")
    assert out.getvalue() == "one\x1b[2J two\n\n"  # a pipe gets the text as it is
    lines = err.getvalue().splitlines()
    assert lines[:2] == ["  6 tokens after 6 s, 1 tokens/s", "  12 tokens after 12 s, 1 tokens/s"]
    assert (
        lines[2].startswith("  worker 1: 12 tokens (length)  long words long words") and lines[2].endswith("...") and len(lines[2]) == 110
    )
    assert lines[3] == "  worker 2: 1 token (stop)  \u3042" and lines[4] == "  together 13 tokens in 12.0 s, 1 tokens/s"
    assert lines[5:] == ["synthesizer: reading 12 tokens from 2 caches", "figures"]


def test_quiet_and_answer_elsewhere():
    out, err = io.StringIO(), io.StringIO()
    for arguments in ({"quiet": True}, {"answer": False}):
        with open_screen(**arguments, stdout=out, stderr=err) as screen:
            feed(screen, ["a", SUMMER])
            screen.end_workers()
            screen.answer("text")
            screen.end_answer("figures")
        assert (out.getvalue(), bool(err.getvalue())) == ("text\n", not arguments.get("quiet"))
    screen = open_screen(quiet=True, stdout=out, stderr=err)
    for tell in (screen.note, screen.say):
        tell(tell.__name__)
    assert err.getvalue().endswith("figures\nsay\n")


def test_missing_streams():
    screen = Screen(None, None)
    feed(screen, ["a"])
    screen.end_workers()
    screen.say("nobody listens")
    screen.answer("nobody reads")
    screen.end_answer("figures")
    screen.stop()
    assert screen.quiet and not screen.shows_answer


@pytest.mark.parametrize(
    "environment, live, colour",
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
    ],
)
def test_the_environment_decides(monkeypatch, environment, live, colour):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = open_screen(stdout=io.StringIO(), stderr=Terminal())
    assert isinstance(screen, LiveScreen) == live and getattr(screen, "colour", False) == colour
    assert not isinstance(open_screen(quiet=True, stderr=Terminal()), LiveScreen)
    assert not isinstance(open_screen(stderr=io.StringIO()), LiveScreen)


@pytest.mark.parametrize("live", [False, True])
def test_characters_that_the_encoding_lacks(live):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    screen = LiveScreen(stream, stream, colour=False) if live else Screen(stream, stream)
    feed(screen, ["\u6771" * 30, "\udcff"])
    screen.end_workers()
    screen.answer("\u6771\udcff")
    text = raw.getvalue().decode("ascii")
    assert text.endswith("\\u6771\\udcff") and "worker 1: 12 tokens (length)  \\u6771\\u6771" in text
    assert max(map(len, re.findall(r"  worker 1: .*", text))) <= 110


def test_the_import_is_light():
    code = "import sys, minips.screen, minips.chat_loop; print(*{'torch', 'numpy', 'minips.screen_live'} & {*sys.modules})"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout == "\n"


def test_on_a_real_terminal():
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm"}
    code = "from tests.test_screen import *\nwith open_screen() as s:\n  feed(s, ['x '] * 30, 4)\n  raise KeyboardInterrupt"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, env=environment)
    os.close(child)
    seen = b""
    while True:
        try:
            seen += os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
    os.close(parent)
    assert process.wait(30) != 0 and b"\r\x1b[2K" in seen and b"and 9 more" in seen
    text = seen.decode()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and text.rindex("\x1b[?7h") > text.rindex("\x1b[?7l")
