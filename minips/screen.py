"""What a person sees of a run: the workers and the figures on stderr, the answer on stdout.

`open_screen` picks the form: on a terminal worker lines that update in place (`screen_live`), else plain lines, or nothing
at all. The answer is the same in all of them. Text from a model never reaches a terminal with control characters in it.
"""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

from .errors import counted

SIGN_OF_LIFE_SECONDS = 5.0
PLAIN_WIDTH = 110  # columns of a line that goes into a file
KEPT_CHARACTERS = 400  # of a worker's newest text, more than a line shows
ZERO_WIDTH_JOINER, EMOJI_SELECTOR = "\u200d", "\ufe0f"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 and C1 but newline and tab
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")  # would reorder the rest of a line


def clean(text: str) -> str:
    """Text without control characters; newlines and tabs stay."""
    return _CONTROLS.sub("", text)


def one_line(text: str) -> str:
    """Text on one line: white space is single blanks, no control characters, none that change the writing direction."""
    return " ".join(_DIRECTIONS.sub("", _CONTROLS.sub("", " ".join(text.split()))).split())


def clusters(text: str) -> Iterator[tuple[str, int]]:
    """Split text into what a reader takes for one character, each with its width in columns.

    Terminals differ on joined emoji; the width is the largest that one may use, so that a line cut by it never overflows.
    """
    cluster, width, open_flag = "", 0, False
    for character in text:
        joins, columns, flag = _character(character)
        if cluster and not (joins or flag and open_flag or cluster[-1] == ZERO_WIDTH_JOINER):
            yield cluster, width
            cluster, width, open_flag = "", 0, False
        open_flag = flag and not cluster
        cluster += character
        width += columns
    if cluster:
        yield cluster, width


@lru_cache(maxsize=4096)
def _character(character: str) -> tuple[bool, int, bool]:
    """Whether it joins the character before, its width in columns, whether it is half of a flag."""
    kind = unicodedata.category(character)
    mark, tone = kind in ("Mn", "Me", "Cf"), "\U0001f3fb" <= character <= "\U0001f3ff"
    joins = mark or tone or kind == "Mc" or "\u1160" <= character <= "\u11ff"  # the last: the later letters of a Hangul syllable
    wide = unicodedata.east_asian_width(character) in "WF" or "\U0001f300" <= character <= "\U0001faff"
    columns = int(character == EMOJI_SELECTOR) if mark else 2 if wide else 1
    return joins, columns, "\U0001f1e6" <= character <= "\U0001f1ff"


def width_of(text: str) -> int:
    """Columns that a line of text takes, at most."""
    return len(text) if text.isascii() else sum(_character(character)[1] for character in text)


def fit(text: str, columns: int, tail: bool = False) -> str:
    """The head of a line (or its tail) that fits into `columns`, with "..." where something was left out; no character is cut."""
    if width_of(text) <= columns:
        return text
    if columns <= 3:
        return "." * max(0, columns)
    room, kept = columns - 3, []
    if text.isascii():
        return "..." + text[-room:] if tail else text[:room] + "..."
    pieces = list(clusters(text))
    for cluster, width in reversed(pieces) if tail else pieces:
        room -= width
        if room < 0:
            break
        kept.append(cluster)
    return "..." + "".join(reversed(kept)) if tail else "".join(kept) + "..."


@dataclass
class WorkerLine:
    """What is known of one worker. state: waiting, writing, or how it ended. seconds: from the start to its last token."""

    label: str
    limit: int
    state: str = "waiting"
    tokens: int = 0
    text: str = ""  # the newest, while it writes; all of it once it has ended
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.state not in ("waiting", "writing")


class Screen:
    """Plain lines: a sign of life every few seconds while the workers write, then one line a worker.

    quiet: nothing on stderr but what `say` is given. shows_answer False: nothing on stdout. A context manager; leaving it, or `stop`,
    ends whatever is being shown on a line of its own, so that an error or the next prompt can follow. Usable for many rounds.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None, *, quiet: bool = False, shows_answer: bool = True):
        self.stdout, self.stderr = stdout, stderr
        self.quiet, self.shows_answer = quiet or stderr is None, shows_answer and stdout is not None
        self.workers: list[WorkerLine] = []
        self.started = self.last_drawn = 0.0
        self._made = 0
        self._open_line = False  # the answer's last line has no end yet

    @property
    def columns(self) -> int:
        """Widest line to write."""
        return terminal_size(self.stderr)[0] - 1 if is_terminal(self.stderr) else PLAIN_WIDTH  # it may wrap at the last column

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End what is being shown, finished or not."""
        self.workers = []
        if self._open_line and is_terminal(self.stdout):
            write(self.stdout, "\n")
        self._open_line = False

    def say(self, text: str) -> None:
        """Lines on stderr, quiet or not: errors, and what a person has asked to see."""
        if self.stderr is not None:
            write(self.stderr, clean(text) + "\n")

    def note(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            self.say(text)

    # The workers

    def start_workers(self, labels: Sequence[str], limits: Sequence[int]) -> None:
        """The workers begin to write now. limits: the tokens that each may make."""
        self.workers = [WorkerLine(label, limit) for label, limit in zip(labels, limits, strict=True)]
        self.started = self.last_drawn = time.perf_counter()
        self._made = 0

    def worker_token(self, row: int, token: int | None, text: str) -> None:
        """The `on_token` of `Engine.decode`: a token (None: the worker has stopped) and the text that it adds."""
        line, now = self.workers[row], time.perf_counter()
        if token is not None:
            line.tokens += 1
            self._made += 1
            line.state = "length" if line.tokens >= line.limit else "writing"
        else:
            line.state = "stop"
        line.seconds = now - self.started
        line.text = (line.text + text)[-KEPT_CHARACTERS:]
        self._progress(now)

    def worker_end(self, row: int, reason: str, tokens: int, text: str) -> None:
        """What a worker has come to in the end. reason: stop, length, given ..."""
        line = self.workers[row]
        line.state, line.tokens, line.text = reason, tokens, text

    def end_workers(self) -> None:
        """One line a worker, and the total."""
        seconds = time.perf_counter() - self.started
        lines, self.workers = self.workers, []
        for line in lines:
            head = f"  {self._shown_text(line.label)}: {counted(line.tokens, 'token')} ({line.state})  "
            text = self._shown_text(line.text[:KEPT_CHARACTERS])
            self.note((head + fit(text, max(0, self.columns - width_of(head)))).rstrip())
        total = sum(line.tokens for line in lines)
        self.note(f"  together {counted(total, 'token')} in {seconds:.1f} s, {total / max(seconds, 1e-9):.0f} tokens/s")

    def _shown_text(self, text: str) -> str:
        """Model text as one line that stderr can write, without the half of a character that a token limit may leave at its end."""
        return "" if self.quiet else encodable(one_line(text.removesuffix("\ufffd")), self.stderr)

    def _progress(self, now: float) -> None:
        if now - self.last_drawn > SIGN_OF_LIFE_SECONDS:
            self.last_drawn = now
            seconds = now - self.started
            self.note(f"  {self._made} tokens after {seconds:.0f} s, {self._made / seconds:.0f} tokens/s")

    # The answer

    def start_answer(self, label: str) -> None:
        """The synthesizer's line."""
        self.note(label)

    def answer(self, piece: str) -> None:
        """A piece of the answer, on stdout at once; without control characters where stdout is a terminal."""
        piece = clean(piece) if is_terminal(self.stdout) else piece
        if self.shows_answer and piece:
            self._open_line = not piece.endswith("\n")
            write(self.stdout, piece)

    def end_answer(self, figures: str) -> None:
        """The answer's last newline, and the line of figures."""
        if self.shows_answer:
            write(self.stdout, "\n")
        self._open_line = False
        self.note(figures)


def open_screen(quiet: bool = False, answer: bool = True, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Screen:
    """The screen for these streams (default: the process's own): live on a terminal that can move its cursor, else plain.

    quiet: nothing on stderr. answer=False: the answer is not written to stdout (the caller prints something else there).
    """
    stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
    term = os.environ.get("TERM", "dumb")
    able = term not in ("", "dumb") if os.name != "nt" else "WT_SESSION" in os.environ
    if quiet or not able or not is_terminal(stderr):
        return Screen(stdout, stderr, quiet=quiet, shows_answer=answer)
    from .screen_live import LiveScreen

    return LiveScreen(stdout, stderr, shows_answer=answer, colour=not os.environ.get("NO_COLOR"))


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of a terminal now."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24  # some report 0 x 0


def write(stream: TextIO, text: str) -> None:
    """Write and flush; a character that the stream's encoding lacks is written as its escape."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(encodable(text, stream))
    stream.flush()


def encodable(text: str, stream: TextIO) -> str:
    """Text as the stream's encoding can write it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
