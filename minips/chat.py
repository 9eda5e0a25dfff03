"""Chat formats: prompts as pieces of one well-formed conversation (CONTRACT.md section 1).

Turns are built from marker ids and content; no template language is run. What a model's own template adds (a default
system text, date lines, the dress of tool results) is recognised in the template's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import MinipsError
from .reading import read_json
from .tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
DEFAULT_DATE = "26 Jul 2024"  # Llama 3.1's own; never today's, so that ids do not change from day to day
FORMAT_MARKERS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
_KNOWLEDGE_DATE = "Cutting Knowledge Date"
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'\"]+?)<\|im_end\|>")
_UNSUPPORTED_FIELDS = ("tool_calls", "function_call", "reasoning_content")

Pieces = list  # of str (content) and int (marker ids)


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes conversations. Build it with `detect_format`.

    name: llama3 or chatml. default_system: inserted where none is given. date: of Llama 3.1's date lines, None where the
    model has none. tools: how a tool's result is written: plain (role tool), ipython, ipython_json (content as a JSON
    string, as Llama 3.1's template does) or response (<tool_response> in a user turn). drops_thinking: thoughts of
    earlier assistant turns are left out, as Qwen3's template does.
    """

    name: str
    tokenizer: Tokenizer
    default_system: str | None = None
    date: str | None = None
    tools: str = "plain"
    drops_thinking: bool = False

    # The pieces, as ids

    def prefix(self, prompt: str | list, system: str | None = None) -> list[int]:
        """c_sh: the system turn, then an open user turn holding a string, or the closed turns of messages."""
        if isinstance(prompt, str):
            _check_text("system", system, optional=True)
            opened = [*self._header("user"), prompt.lstrip() if self._trims else prompt]
            return self._encode([*self._begin(), *self._system(system), *opened])
        return self._encode(self._conversation(prompt, system, answered=True))

    def branch(self, prompt: str | list, *, open_turn: bool, empty_prefix: bool = False) -> list[int]:
        """c_br: what follows the prefix, up to the assistant header.

        A string ends the prefix's open user turn, after a blank line (`empty_prefix`: the turn is still empty, so none);
        after closed turns it is a user turn of its own. An empty string adds only the closing and the header.
        """
        if isinstance(prompt, str):
            if not open_turn:
                turn = self._turn("user", self._trim(prompt)) if prompt else []
                return self._encode([*turn, *self._header("assistant")])
            text = prompt.rstrip() if self._trims else prompt
            text = self._trim(text) if empty_prefix else "\n\n" + text if text else ""
            return self._encode([text, *self._end(), *self._header("assistant")])
        closing = self._end() if open_turn else []
        return self._encode([*closing, *self._fragment(prompt), *self._header("assistant")])

    def continuation(self, prompt: str | list) -> list[int]:
        """u, or the next turn of a branch: closes the assistant's turn, then a user turn or closed turns, then the header."""
        turns = self._turn("user", self._trim(prompt)) if isinstance(prompt, str) else self._fragment(prompt)
        return self._encode([*self._end(), *turns, *self._header("assistant")])

    def full(self, prompt: str | list, system: str | None = None) -> list[int]:
        """A whole conversation with the assistant header: what the model's own template gives."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._encode([*self._conversation(messages, system), *self._header("assistant")])

    @property
    def turn_end(self) -> int:
        """The token with which the model ends its own turn."""
        return self._end()[0]

    # Turns

    @property
    def _trims(self) -> bool:
        return self.name == "llama3"

    def _trim(self, text: str) -> str:
        return text.strip() if self._trims else text

    def _encode(self, pieces: Pieces) -> list[int]:
        return self.tokenizer.encode_pieces(pieces)

    def _id(self, marker: str) -> int:
        token = self.tokenizer.special_id(marker)
        assert token is not None, marker
        return token

    def _begin(self) -> Pieces:
        return [self._id("<|begin_of_text|>")] if self.name == "llama3" else []

    def _header(self, role: str) -> Pieces:
        if self.name == "llama3":
            return [self._id("<|start_header_id|>"), role, self._id("<|end_header_id|>"), "\n\n"]
        return [self._id("<|im_start|>"), f"{role}\n"]

    def _end(self) -> Pieces:
        return [self._id("<|eot_id|>")] if self.name == "llama3" else [self._id("<|im_end|>"), "\n"]

    def _turn(self, role: str, text: str) -> Pieces:
        return [*self._header(role), text, *self._end()]

    def _system(self, text: str | None) -> Pieces:
        text = self.default_system if text is None else text
        if self.date is not None:
            dates = f"{_KNOWLEDGE_DATE}: December 2023\nToday Date: {self.date}\n\n"
            return self._turn("system", dates + self._trim(text or ""))
        return [] if text is None else self._turn("system", self._trim(text))

    def _conversation(self, messages: list, system: str | None, answered: bool = False) -> Pieces:
        _check_text("system", system, optional=True)
        messages = _checked(messages, system_first=True)
        if messages[0]["role"] == "system":
            if system is not None:
                raise MinipsError("messages[0] is a system message and system= is given too; expected one of the two")
            system, messages = messages[0]["content"], messages[1:]
        last_query = len(messages) if answered else _last_query(messages, len(messages) - 1)
        return [*self._begin(), *self._system(system), *self._turns(messages, last_query)]

    def _fragment(self, messages: list) -> Pieces:
        messages = _checked(messages, system_first=False)
        return self._turns(messages, _last_query(messages, -1))

    def _turns(self, messages: list, last_query: int) -> Pieces:
        pieces: Pieces = []
        for index, message in enumerate(messages):
            role, text = message["role"], self._trim(message["content"])
            if role == "tool":
                before = index > 0 and messages[index - 1]["role"] == "tool"
                after = index + 1 < len(messages) and messages[index + 1]["role"] == "tool"
                pieces += self._tool(message["content"], before, after)
                continue
            if role == "assistant" and self.drops_thinking:
                text = _assistant_text(text, index > last_query, index + 1 == len(messages))
            pieces += self._turn(role, text)
        return pieces

    def _tool(self, text: str, before: bool, after: bool) -> Pieces:
        """A tool's result; `before` and `after`: its neighbours are results too, which then share one user turn."""
        if self.tools == "response":
            opened = [] if before else [self._id("<|im_start|>"), "user"]
            return [*opened, f"\n<tool_response>\n{text}\n</tool_response>", *([] if after else self._end())]
        if self.tools == "ipython_json":
            return self._turn("ipython", json.dumps(text, ensure_ascii=False))
        return self._turn("ipython" if self.tools == "ipython" else "tool", self._trim(text))


def detect_format(folder: str | Path | None, tokenizer: Tokenizer, *, date: str = DEFAULT_DATE) -> ChatFormat | None:
    """The chat format whose markers the tokenizer has, or None. `folder`: where the model's own template may lie.

    `date` is for the date lines of Llama 3.1 and 3.2. MinipsError where a template file is broken or the date no text.
    """
    _check_text("date", date)
    name = next((n for n, markers in FORMAT_MARKERS.items() if all(tokenizer.special_id(m) is not None for m in markers)), None)
    template = (_read_template(Path(folder)) if folder is not None else None) if name else None
    if name == "llama3":
        if template is None:  # <|eom_id|> came with 3.1
            recent = tokenizer.special_id("<|eom_id|>") is not None
            return ChatFormat(name, tokenizer, date=date if recent else None, tools="ipython_json" if recent else "ipython")
        tools = "plain" if "ipython" not in template else "ipython_json" if "message.content | tojson" in template else "ipython"
        return ChatFormat(name, tokenizer, date=date if _KNOWLEDGE_DATE in template else None, tools=tools)
    if name == "chatml":
        template = template or ""
        found = _DEFAULT_SYSTEM.search(template)
        literal = found is not None and "{{" not in found[1] and "{%" not in found[1]
        default = found[1].replace("\\n", "\n").replace("\\\\", "\\") if literal else None
        tools = "response" if "<tool_response>" in template else "plain"
        return ChatFormat(name, tokenizer, default, tools=tools, drops_thinking="last_query_index" in template)
    return None


def require_format(chat: ChatFormat | None) -> ChatFormat:
    """The format itself; MinipsError where the model has none that is known."""
    if chat is None:
        known = ", ".join(f"{name} ({' '.join(markers)})" for name, markers in FORMAT_MARKERS.items())
        raise MinipsError(f"the model's chat format is unknown; known: {known}; use raw prompts (raw=True) or token ids")
    return chat


SUMMARY_PROMPT = "Summarize what you found in one or two short sentences. Keep names, numbers and the answer."


def default_prompt(task: str) -> str:
    """The default synthesizer prompt: it restates the task, which measures better than leaving it to the prefix."""
    _check_text("task", task)
    return f"Using the findings above, give one final answer to this task:\n\n{task}"


def text_prompt(task: str, texts: Sequence[str], prompt: str) -> str:
    """The user turn of method `text`: the task, each worker's text under a numbered heading, the synthesizer's prompt."""
    for what, text in (("task", task), ("prompt", prompt), *((f"texts[{i}]", text) for i, text in enumerate(texts))):
        _check_text(what, text)
    findings = (f"## Finding {number}\n\n{text.strip()}" for number, text in enumerate(texts, 1))
    return "\n\n".join(part for part in (task, *findings, prompt) if part)


def _check_text(what: str, value: object, optional: bool = False) -> None:
    if not isinstance(value, str) and not (optional and value is None):
        raise MinipsError(f"{what} is {type(value).__name__}, expected a string")


def _checked(messages: object, system_first: bool) -> list[dict]:
    """Messages as a list of dicts with a known role and text; the first fault is named with its index."""
    if not isinstance(messages, (list, tuple)):
        raise MinipsError(f"prompt is {type(messages).__name__}, expected a string or a list of messages")
    if not messages:
        raise MinipsError("messages: the list is empty, expected at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MinipsError(f"messages[{index}] is {type(message).__name__}, expected an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise MinipsError(f"messages[{index}]: role is {role!r}, expected one of {', '.join(ROLES)}")
        if "content" not in message:
            raise MinipsError(f"messages[{index}]: content is missing, expected a string")
        _check_text(f"messages[{index}]: content", message["content"])
        for name in _UNSUPPORTED_FIELDS:
            if message.get(name):
                raise MinipsError(f"messages[{index}]: field {name!r} is not supported; write it into content")
        if role == "system" and not (system_first and index == 0):
            where = "only the first message may be one" if system_first else "it can only open the conversation, in the prefix"
            raise MinipsError(f"messages[{index}] is a system message; {where}")
    return list(messages)


def _last_query(messages: list[dict], default: int) -> int:
    """Index of the last user message that is no tool result in disguise: thoughts after it are still of use."""
    for index in range(len(messages) - 1, -1, -1):
        text = messages[index]["content"]
        wrapped = text.startswith("<tool_response>") and text.endswith("</tool_response>")
        if messages[index]["role"] == "user" and not wrapped:
            return index
    return default


def _assistant_text(text: str, current: bool, last: bool) -> str:
    """An assistant turn in Qwen3's way: thoughts only where the turn still belongs to the last question."""
    thought = ""
    if "</think>" in text:
        thought = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        text = text.split("</think>")[-1].lstrip("\n")
    if not current or not (last or thought):
        return text
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + text.lstrip("\n")


def _read_template(folder: Path) -> str | None:
    """Text of the model's chat template, from wherever it lies; None where there is none."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MinipsError(f"{path}: not readable as text ({error})") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(found, list):  # several, by name
            found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
        if isinstance(found, str):
            return found
        if found is not None:
            raise MinipsError(f"{folder / name}: chat_template is {type(found).__name__}, expected a string")
    return None
