"""Worker lines that update in place on a terminal.

Between two frames the cursor rests at the start of the first worker line. A frame writes the lines from there, erases what
is left below and goes back up. So nothing need be known about the frame before: when the terminal is resized, the cursor stays with
the text that it stands on, however the terminal has wrapped the rest. The cursor is hidden only while a frame is being written:
no way of ending or suspending the process can leave it hidden.
"""

from __future__ import annotations

import time
from typing import TextIO

from .screen import Screen, WorkerLine, clean, fit, terminal_size, width_of, write

FRAME_SECONDS = 0.12
LABEL_WIDTH = 24
FRAME, END = "\x1b[?25l\x1b[?7l\r", "\x1b[?7h\x1b[?25h"  # no cursor and no automatic line wrap while a frame is written
ERASE_RIGHT, ERASE_BELOW = "\x1b[K", "\x1b[J"
ERASE_FRAME = "\r\x1b[2K\x1b[C" + ERASE_BELOW + "\r"  # from the second column: erasing a whole screen would store it in tmux's history
COLOURS = {"waiting": "2", "writing": "36", "stop": "32", "length": "33"}  # SGR: dim, cyan, green, yellow


class LiveScreen(Screen):
    """A `Screen` for a terminal on stderr. More workers than rows: the first ones are shown, and how many more there are."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO, *, shows_answer: bool = True, colour: bool = True):
        super().__init__(stdout, stderr, shows_answer=shows_answer)
        self.colour = colour
        self._shown = False  # a frame stands on the terminal
        self._last_size = (0, 0)

    def say(self, text: str) -> None:
        self._erase()
        super().say(text)

    def note(self, text: str) -> None:
        self._erase()
        write(self.stderr, self._paint(clean(text), "2") + "\n")

    def stop(self) -> None:
        self._erase()
        super().stop()

    def start_workers(self, labels: list[str], limits: list[int]) -> None:
        super().start_workers(labels, limits)
        self._draw()

    def _progress(self, now: float) -> None:
        if now - self.last_drawn >= FRAME_SECONDS:
            self._draw()

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            write(self.stderr, ERASE_FRAME + END)  # Ctrl-C may have cut a frame short

    def _draw(self) -> None:
        self._shown, before, self._last_size = True, self._last_size, terminal_size(self.stderr)
        lines = self._lines()
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        fresh = "" if self._last_size == before else ERASE_FRAME  # rows that the terminal has wrapped would stay joined
        write(self.stderr, FRAME + fresh + "\n".join(line + ERASE_RIGHT for line in lines) + ERASE_BELOW + "\r" + up + END)
        self.last_drawn = time.perf_counter()

    def _lines(self) -> list[str]:
        columns, rows = self._last_size
        room = max(1, rows - 2)  # of worker lines; the total takes one row, one stays free
        hidden = self.workers[room - 1 :] if len(self.workers) > room else []
        shown = self.workers[: len(self.workers) - len(hidden)]
        labels = min(LABEL_WIDTH, columns // 3, max((width_of(self._shown_text(line.label)) for line in self.workers), default=0))
        lines = [self._line(line, labels, columns - 1) for line in shown]
        if hidden:
            writing = sum(not line.done for line in hidden)
            lines.append(fit(f"  and {len(hidden)} more, {writing} of them not done", columns - 1))
        seconds = max(time.perf_counter() - self.started, 1e-9)
        total = f"  together {self._made} tokens after {seconds:.0f} s, {self._made / seconds:.0f} tokens/s"
        return [*lines, self._paint(fit(total, columns - 1), "2")] if rows > 1 else lines[:1]

    def _line(self, line: WorkerLine, labels: int, columns: int) -> str:
        label = fit(self._shown_text(line.label), labels)
        label += " " * (labels - width_of(label))
        rate = f"{line.tokens / line.seconds:5.1f}" if line.seconds > 0 else "    -"
        limit = str(line.limit)
        parts = [f"  {label}  ", f"{line.state:<7}", f"  {line.tokens:>{len(limit)}}/{limit} tokens  {rate}/s  "]
        used = width_of("".join(parts))
        if used > columns:  # a narrow terminal
            return fit("".join(parts).rstrip(), columns)
        text = self._shown_text(line.text)[-2 * columns :]  # all that can be seen, or little more
        text = fit(text, columns - used, tail=True)
        return parts[0] + self._paint(parts[1], COLOURS.get(line.state, "")) + parts[2] + self._paint(text, "2")

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style and text else text
