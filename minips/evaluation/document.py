"""A report as a list of blocks, written as Markdown and as one self-contained HTML page.

Every text may hold anything (a model wrote some of it): it is escaped here, and here only. Control characters, also those that
reorder a line, are shown as symbols or codes instead of being passed on.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Strong(str):
    """A table cell that stands out."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """header and rows hold strings; all columns behind the first `left` ones hold figures and are set right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Image:
    """A PNG beside the report."""

    path: Path
    text: str


@dataclass(frozen=True)
class Sample:
    """Longer texts under labels, shown as they are."""

    title: str
    parts: Sequence[tuple[str, str]] = field(default_factory=list)


Block = Heading | Text | Table | Image | Sample

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")
_MARKUP = re.compile(r"([\\`*\[\]<>|&~$#]|(?<![^\W_])_|_(?![^\W_]))")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc } .wide { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; white-space: nowrap }
th.l, td.l { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 6rem } thead th { border-bottom: 2px solid #888 }
img { max-width: 100%; background: #fff } details { margin: .5rem 0 } summary { cursor: pointer }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .5rem .75rem; margin: .25rem 0 .75rem }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } pre { background: #262626 } h2, th, td { border-color: #444 }
}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing is fetched, nothing runs


def clean(text: str) -> str:
    """Text with its control characters made visible; newlines (of any kind) and tabs stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HIDDEN.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else f"<U+{ord(found[0]):04X}>", text)


def to_markdown(blocks: Sequence[Block]) -> str:
    """GitHub-flavoured Markdown; images are named by their file."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def to_html(blocks: Sequence[Block], title: str) -> str:
    """One HTML page with everything in it, images too."""
    body = "\n".join(map(_html, blocks))
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_escape(title)}</title>\n<style>{_STYLE}</style>'
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_inline(block.text)}"
    if isinstance(block, Text):
        return _inline(block.text)
    if isinstance(block, Image):
        return f"![{_inline(block.text)}]({block.path.name})"
    if isinstance(block, Sample):
        parts = [f"**{_inline(label)}**\n\n{_fenced(text)}" for label, text in block.parts]
        return "\n\n".join([f"### {_inline(block.title)}", *parts])
    rule = ["---" if at < block.left else "---:" for at in range(len(block.header))]
    lines = [map(_inline, block.header), rule, *(map(_cell, row) for row in block.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would read as a mark."""
    return _MARKUP.sub(r"\\\1", " ".join(clean(text).split()))


def _cell(text: str) -> str:
    return f"**{_inline(text)}**" if isinstance(text, Strong) else _inline(text)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    text = clean(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_escape(block.text)}</p>"
    if isinstance(block, Image):
        data = base64.b64encode(block.path.read_bytes()).decode()
        return f'<p><img alt="{_escape(block.text)}" src="data:image/png;base64,{data}"></p>'
    if isinstance(block, Sample):
        parts = "\n".join(f"<p><strong>{_escape(label)}</strong></p>\n<pre>\n{_escape(text)}</pre>" for label, text in block.parts)
        return f"<details>\n<summary>{_escape(block.title)}</summary>\n{parts}\n</details>"
    head = _html_row(block.header, "th", block.left)
    rows = "\n".join(_html_row(row, "td", block.left) for row in block.rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _html_row(cells: Sequence[str], tag: str, left: int) -> str:
    marks = [' class="l"' if at < left else "" for at in range(len(cells))]
    texts = [f"<strong>{_escape(cell)}</strong>" if isinstance(cell, Strong) else _escape(cell) for cell in cells]
    return f"<tr>{''.join(f'<{tag}{mark}>{text}</{tag}>' for mark, text in zip(marks, texts))}</tr>"


def _escape(text: str) -> str:
    return html.escape(clean(text))
