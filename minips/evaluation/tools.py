"""The tools of multi-turn workers: what one is, how it is called, a calculator, a file reader, and which tools an example has.

What goes wrong in a call comes back as a result that starts with "error:", so that the model can mend its call. Every tool is bounded in time and in what it returns.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ..errors import MinipsError, brief
from ..reading import is_integer
from .calculator import calculate
from .example import Example
from .postgres import dsn_for, run_query

FILE_CHARACTERS = 6000  # of a file in one result
LISTED_FILES = 100
_CHECKS = {
    "string": lambda value: isinstance(value, str),
    "integer": is_integer,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
}


@dataclass(frozen=True)
class Call:
    """One tool call as the model wrote it. error: why it cannot be run ("" if it can)."""

    name: str
    arguments: dict
    error: str = ""


@dataclass(frozen=True)
class Tool:
    """parameters: a JSON schema of one object with plain fields (type string, integer, number or boolean; enum).

    run(arguments) gets checked arguments and returns the result's text; what it raises becomes the result's error line.
    """

    name: str
    description: str
    parameters: dict
    run: Callable[[dict], str]


@dataclass(frozen=True)
class Toolbox:
    """The tools of one worker. first_call: made by the harness before the worker's first turn, its result being what it starts from."""

    tools: tuple[Tool, ...]
    first_call: Call | None = None

    def run(self, call: Call) -> str:
        """The result of a call, or a line that starts with "error:". Only MinipsError passes: what no model can mend (a lost database)."""
        if call.error:
            return f"error: {call.error}"
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            return f"error: there is no tool {brief(call.name, 60)}; tools: {', '.join(tool.name for tool in self.tools) or 'none'}"
        arguments, fault = check_arguments(tool, call.arguments)
        if fault:
            return f"error: {tool.name}: {fault}"
        try:
            return tool.run(arguments)
        except MinipsError:
            raise
        except Exception as error:  # noqa: BLE001 - the worker goes on: it is told of the failure
            return f"error: {tool.name}: {' '.join(str(error).split()) or type(error).__name__}"


def check_arguments(tool: Tool, given: Mapping) -> tuple[dict, str]:
    """Arguments in the schema's types ("3" becomes 3 where an integer is due) and what is wrong with them ("" if nothing)."""
    fields = tool.parameters.get("properties", {})
    unknown = [name for name in given if name not in fields]
    if unknown:
        return {}, f"argument {brief(unknown[0], 60)} is unknown; arguments: {', '.join(fields) or 'none'}"
    missing = [name for name in tool.parameters.get("required", ()) if given.get(name) is None]
    if missing:
        return {}, f"argument {missing[0]!r} is missing"
    checked = {}
    for name, value in given.items():
        if value is None:
            continue
        kind = fields[name].get("type", "string")
        value = _converted(value, kind)
        if not _CHECKS[kind](value):
            return {}, f"argument {name!r} is {brief(value, 60)}, expected type {kind}"
        if "enum" in fields[name] and value not in fields[name]["enum"]:
            return {}, f"argument {name!r} is {brief(value, 60)}, expected one of {', '.join(map(str, fields[name]['enum']))}"
        checked[name] = value
    return checked, ""


def _converted(value: object, kind: str) -> object:
    """Text as the plain value that it spells, and a number as text where text is due: models often quote wrongly."""
    if kind == "string":
        return str(value) if isinstance(value, (int, float)) else value
    if isinstance(value, str):
        try:
            value = json.loads(value.strip().lower() if kind == "boolean" else value)
        except (ValueError, RecursionError):
            return value
    return int(value) if kind == "integer" and isinstance(value, float) and value.is_integer() else value


def tool_prompt(toolbox: Toolbox) -> str:
    """What a worker is told about its tools and about the form of calls and answers; part of its system text or prompt."""
    described = (
        json.dumps({"name": t.name, "description": t.description, "parameters": t.parameters}, ensure_ascii=False) for t in toolbox.tools
    )
    return "\n".join(
        (
            "You have these tools, one JSON object a line:",
            "<tools>",
            *described,
            "</tools>",
            "To use a tool, write its name and its arguments as JSON, like this, and end your turn:",
            '<tool_call>{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>',
            "The result comes back inside <tool_response>. When you know enough, write what you found as <answer>YOUR ANSWER</answer>.",
        )
    )


def agent_system(toolbox: Toolbox, today: date | None = None) -> str:
    """System text of tool workers: what they are for, the date where one is given, and the tools."""
    day = f" Today is {today.day} {today:%B %Y}." if today else ""
    return f"You solve tasks step by step.{day}\n\n{tool_prompt(toolbox)}"


# The tools


def calculator() -> Tool:
    """Arithmetic on one expression, bounded in size and time (`calculator.py`)."""
    field = {"type": "string", "description": "such as (3 + 4) * sqrt(2) or comb(10, 3); ^ is a power"}
    schema = {"type": "object", "properties": {"expression": field}, "required": ["expression"]}
    return Tool("calculator", "Compute an arithmetic expression.", schema, lambda arguments: calculate(arguments["expression"]))


def view(views: Mapping[str, str]) -> Tool:
    """Given texts by name, such as the views of a database's monitors."""
    field = {"type": "string", "enum": list(views), "description": "the monitor"}
    schema = {"type": "object", "properties": {"name": field}, "required": ["name"]}
    return Tool("view", "Show what one monitor reports.", schema, lambda arguments: views[arguments["name"]])


def query(dsn: str) -> Tool:
    """One reading SQL statement on a PostgreSQL database (`postgres.py`)."""
    field = {"type": "string", "description": "one SELECT, WITH, VALUES, TABLE, SHOW or EXPLAIN statement"}
    schema = {"type": "object", "properties": {"sql": field}, "required": ["sql"]}
    return Tool(
        "query", "Run one SQL statement on the database; it can only read.", schema, lambda arguments: run_query(dsn, arguments["sql"])
    )


def read_file(folder: str | Path, only: str = "") -> Tool:
    """Text files below `folder`, a part at a time; directories are listed. only: the one file there that may be seen."""
    root = Path(folder)
    fields = {
        "path": {"type": "string", "description": f"the file: {only}" if only else 'path of a file; "." lists the files'},
        "start": {"type": "integer", "description": "first byte to show (default 0)"},
    }
    schema = {"type": "object", "properties": fields, "required": ["path"]}

    def run(arguments: dict) -> str:
        if only and Path(arguments["path"]) != Path(only):
            return f"error: read_file: {brief(arguments['path'], 80)} does not exist; there is {only}"
        return read_below(root, arguments["path"], arguments.get("start", 0))

    return Tool("read_file", "Read a text file.", schema, run)


def read_below(root: Path, path: str, start: int = 0) -> str:
    """Text of a file below `root` from byte `start` on, at most FILE_CHARACTERS; the names in a directory.

    A path that leads out of `root`, through `..`, an absolute path or a link, is an error, and so is anything but a plain file.
    """
    try:
        base = root.resolve(strict=True)
        place = (base / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return f"error: read_file: {brief(path, 80)} does not exist"
    if not place.is_relative_to(base):
        return f"error: read_file: {brief(path, 80)} lies outside the given folder"
    try:
        if place.is_dir():
            return _listing(place)
        # the checks above say what the path was: opening neither follows a link nor waits for a pipe's other end
        file = os.open(place, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        return f"error: read_file: {brief(path, 80)} cannot be read ({error.strerror or error})"
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return f"error: read_file: {brief(path, 80)} is no plain file"
        return _part(stream, path, status.st_size, start)


def _listing(place: Path) -> str:
    with os.scandir(place) as entries:
        names = [ascii(e.name)[1:-1] + ("/" if e.is_dir(follow_symlinks=False) else "") for e in entries]
    shown = sorted(names)[:LISTED_FILES]
    left = [f"... and {len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return "\n".join([*shown, *left]) or "(no files)"


def _part(stream, path: str, size: int, start: int) -> str:
    """The part of an open file from byte `start` on, with a line that says where to go on."""
    if not 0 <= start <= size:
        return f"error: read_file: start is {start}, expected 0 to {size}, the file's size"
    if b"\0" in stream.read(8192):
        return f"error: read_file: {brief(path, 80)} is a binary file of {size} bytes; only text can be read"
    stream.seek(start)
    data = stream.read(FILE_CHARACTERS)
    while start + len(data) < size and data and len(data) > FILE_CHARACTERS - 4 and not _is_text(data):
        data = data[:-1]  # a character that the limit cuts in two belongs to the next part
    text = data.decode("utf-8-sig" if start == 0 else "utf-8", "replace")
    if text.count("\ufffd") > len(text) // 10:
        text = data.decode("latin-1")
    end = start + len(data)
    more = f"\n(bytes {start} to {end} of {size}; go on with start {end})" if end < size else ""
    return text + more if text else "(empty)"


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def toolboxes(example: Example, workers: int) -> list[Toolbox]:
    """One toolbox a worker, from what the example's meta holds.

    views (name -> text) and dealt (a list of names a worker): the monitors of a synthetic incident; the harness calls the
    first view of each worker itself. root_causes without views: SQL on the database that the DSN names, refused without one.
    Else the calculator, and the reader of files where meta names a folder: of its one file `file_name` where that is named too, of
    none where it is empty (the row's folder also holds the answers).
    """
    meta = example.meta
    if "views" in meta:
        tool = view(meta["views"])
        own: Sequence = meta["dealt"]
        return [Toolbox((tool,), Call("view", {"name": own[at % len(own)][0]})) for at in range(workers)]
    if "root_causes" in meta:
        return [Toolbox((query(dsn_for(example.id)),))] * workers
    attachment = meta.get("file_name")  # None: the whole folder is the worker's
    files = (read_file(meta["folder"], attachment or ""),) if meta.get("folder") and attachment != "" else ()
    return [Toolbox((calculator(), *files))] * workers
