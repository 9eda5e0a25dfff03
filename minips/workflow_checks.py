"""Checks of the values in a workflow. `where` is the path of a value in messages: FILE.json: branches[2].sampling.top_p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from .chat import ROLES
from .config import (
    ANCHORS,
    KEEP_TURNS,
    LAYOUTS,
    PROFILES,
    EngineConfig,
    MergeOptions,
    SamplingParams,
)
from .errors import MinipsError, brief, guess, refuse_unknown
from .reading import is_integer

MAX_WORKERS = 65536
SAMPLING_FIELDS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos"),
)
MERGE_VALUES = {
    "profile": PROFILES,
    "keep_prefix": (True, False),
    "anchor": ANCHORS,
    "layout": LAYOUTS,
    "keep_turns": KEEP_TURNS,
    "keep_stop_token": (True, False),
    "rerotate": (True, False),
    "branch_temperature": None,  # numbers, which MergeOptions checks
    "branch_scale": None,
}
ENGINE_FIELDS = ("device", "dtype", "kv_dtype", "page_size", "max_kv_tokens", "max_device_kv_bytes", "quantize", "compile")
ENGINE_SIZES = ("page_size", "max_kv_tokens", "max_device_kv_bytes")  # null: as the machine allows
TURN_FIELDS = ("prompt", "output", "sampling")
BRANCH_FIELDS = ("label", "count", "turns", *TURN_FIELDS)
MESSAGE_FIELDS = ("role", "content")

Prompt = str | list


def fail(where: str, value: object, expected: str) -> NoReturn:
    raise MinipsError(f"{where} is {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return "an object" if isinstance(value, dict) else brief(value, 60)


def check_object(value: object, where: str, known: Sequence[str] | dict) -> dict:
    if not isinstance(value, dict):
        fail(where, value, "an object")
    refuse_unknown(value, known, where)
    return value


def check_text(value: object, where: str, empty: bool = True) -> str:
    """Text that can be encoded; half a surrogate pair (bytes that are no UTF-8, or a lone \\ud800 in JSON) is no text."""
    if not isinstance(value, str):
        fail(where, value, "a string")
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise MinipsError(f"{where} is not valid text: {brief(value, 60)}")
    if not empty and not value.strip():
        raise MinipsError(f"{where} is empty")
    return value


def _ids(value: object, where: str) -> bool:
    """Whether a list holds token ids."""
    if isinstance(value, list) and value and all(map(is_integer, value)):
        if min(value) < 0:
            fail(where, min(value), "token ids of at least 0")
        return True
    return False


def check_prompt(value: object, where: str, first: bool = False, empty: bool = True) -> Prompt:
    """Text, messages or token ids. first: the prefix, whose first message may be a system message."""
    if isinstance(value, str):
        return check_text(value, where, empty)
    if not isinstance(value, list):
        fail(where, value, "a string, a list of messages or a list of token ids")
    if not value:
        fail(where, value, "at least one message or token id")
    if not _ids(value, where):
        for index, message in enumerate(value):
            at = f"{where}[{index}]"
            check_object(message, at, MESSAGE_FIELDS)
            if message.get("role") not in ROLES:
                hint = guess(message.get("role"), ROLES).rstrip()
                fail(f"{at}.role", message.get("role"), f"one of {', '.join(ROLES)}" + (f"; {hint}" if hint else ""))
            check_text(message.get("content"), f"{at}.content")
            if message["role"] == "system" and not (first and index == 0):
                fail(f"{at}.role", "system", "another role: only the first message of the prefix may be a system message")
    return value


def check_output(value: object, where: str) -> str | list[int]:
    if not _ids(value, where) and not isinstance(value, str):
        fail(where, value, "a string or a list of token ids")
    return value if isinstance(value, list) else check_text(value, where, empty=False)


def _one_field(kind: Callable, where: str, name: str, value: object) -> None:
    """Check one field of a settings class by that class's own rule."""
    try:
        kind(**{name: value})
    except MinipsError as error:
        fail(where, value, str(error).rpartition(", expected ")[2])


def check_sampling_field(name: str, value: object, where: str) -> None:
    if value is None and name != "seed":
        fail(where, value, "a value, or no such field for the default")
    _one_field(SamplingParams, where, name, value)
    for text in (value if isinstance(value, list) else [value]) if name == "stop" else ():
        check_text(text, where)


def check_sampling(value: object, where: str) -> dict:
    for name, entry in check_object(value, where, SAMPLING_FIELDS).items():
        check_sampling_field(name, entry, f"{where}.{name}")
    return value


def check_merge_field(name: str, value: object, where: str) -> None:
    allowed = MERGE_VALUES[name]
    if allowed is None:
        _one_field(MergeOptions, where, name, value)
    elif not any(type(value) is type(known) and value == known for known in allowed):
        fail(where, value, f"one of {', '.join(shown(v) if isinstance(v, bool) else v for v in allowed)}")


def check_merge(value: object, where: str) -> dict:
    for name, entry in check_object(value, where, MERGE_VALUES).items():
        check_merge_field(name, entry, f"{where}.{name}")
    return value


def check_engine_field(name: str, value: object, where: str) -> None:
    if name == "compile":
        if not isinstance(value, bool):
            fail(where, value, "true or false")
    elif name not in (*ENGINE_SIZES, "quantize"):
        check_text(value, where, empty=False)
    elif value is not None:
        _one_field(EngineConfig, where, name, value)


def check_engine(value: object, where: str) -> dict:
    for name, entry in check_object(value, where, ENGINE_FIELDS).items():
        check_engine_field(name, entry, f"{where}.{name}")
    return value


def check_branch(branch: object, where: str) -> int:
    """Check one entry of `branches` -> how many workers it stands for."""
    check_object(branch, where, BRANCH_FIELDS)
    check_text(branch.get("label", ""), f"{where}.label")
    count = branch.get("count", 1)
    if not is_integer(count) or not 1 <= count <= MAX_WORKERS:
        fail(f"{where}.count", count, f"an integer from 1 to {MAX_WORKERS}")
    if "turns" in branch:
        for name in ("prompt", "output"):
            if name in branch:
                raise MinipsError(f"{where}: has both turns and {name}; write {name} into its turn")
        if not isinstance(branch["turns"], list) or not branch["turns"]:
            fail(f"{where}.turns", branch["turns"], "a list of at least one turn")
    check_sampling(branch.get("sampling", {}), f"{where}.sampling")
    for index, turn in enumerate(branch.get("turns", [branch])):
        at = f"{where}.turns[{index}]" if "turns" in branch else where
        if turn is not branch:
            check_object(turn, at, TURN_FIELDS)
            check_sampling(turn.get("sampling", {}), f"{at}.sampling")
        check_prompt(turn.get("prompt", ""), f"{at}.prompt")
        if "output" in turn:
            check_output(turn["output"], f"{at}.output")
            if turn.get("sampling"):
                raise MinipsError(f"{at}: has both output and sampling; what is given is not sampled")
    return count
