"""Parallel context: earlier turns of a dialogue, solved examples of a task, and finished tool calls as branches."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..chat import default_prompt
from ..evaluation.data import Row, Source, read, row_random
from ..training.encoding import Example
from .entry import DataSet, cut
from .sources import of_rows

OASST = Source(
    ("train_oasst1_en/oasst1_val_en", "oasst1/train"), "rows with messages (role, content), ending with the assistant", "Apache-2.0"
)
OASST_TREES = Source(
    ("train_oasst_trees_en/oa_en_100_trees", "oasst_trees/train"),
    "rows with messages (role, content), ending with the assistant",
    "Apache-2.0",
)
SGD = Source(
    ("train_sgd_dialogue/sgd_train_subset", "sgd/train"),
    "rows with messages of the roles user, assistant, call and result, of the Schema-Guided Dialogue data set",
    "CC BY-SA 4.0",
)
_WRITE = "load_dataset({}).to_json(FILE) with the package datasets writes it"
ULTRACHAT = Source(("ultrachat_200k/train_sft",), _WRITE.format("'HuggingFaceH4/ultrachat_200k', split='train_sft'"), "MIT")
WILDCHAT = Source(("wildchat/train",), _WRITE.format("'allenai/WildChat-1M', split='train'"), "ODC-BY")
LMSYS = Source(("lmsys_chat_1m/train",), _WRITE.format("'lmsys/lmsys-chat-1m', split='train'"), "LMSYS-Chat-1M licence (gated)")
FLAN = Source(
    ("train_flan_cot/flan_cot", "flan/cot"), "rows with task, question, answer and rationale, of FLAN's chain-of-thought part", "Apache-2.0"
)
P3 = Source(("train_p3_fewshot/p3_t0_subset", "p3/train"), "rows with task, template, input and target", "Apache-2.0 (P3)")
GLAIVE = Source(
    ("train_glaive_toolcall/glaive_toolcall_en_demo", "glaive/train"),
    "rows with conversations and tools in the ShareGPT form",
    "Apache-2.0",
)
BFCL = Source(
    ("train_bfcl_parallel/bfcl_v4_parallel", "bfcl/parallel"),
    "rows with question, function and ground_truth of the leaderboard",
    "Apache-2.0",
)
LONGEST = 1500  # characters of one message of a branch, and of a target; a longer target leaves the row out


def turns_of(row: Row) -> list[tuple[str, str]]:
    """Role and text of each message, whichever of the usual spellings the row has."""
    name = next((name for name in ("messages", "conversations", "conversation") if name in row.fields), "messages")
    found = []
    for message in row.items(name, dict):
        role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not (isinstance(role, str) and isinstance(text, str)):
            row.refuse(name, "messages with role and content (or from and value)")
        found.append(({"human": "user", "gpt": "assistant"}.get(role, role), text.strip()))
    return found


def rounds_of(turns: Sequence[tuple[str, str]]) -> list[str]:
    """Turns as text, cut before each user turn."""
    rounds: list[list[str]] = []
    for role, text in turns:
        if role == "user" or not rounds:
            rounds.append([])
        rounds[-1].append(f"{role.replace('_', ' ').capitalize()}: {text[:LONGEST]}")
    return ["\n".join(lines) for lines in rounds]


def dialogue(row: Row, branches: int, rng: random.Random) -> Example | None:
    """Earlier rounds as branches, a random user turn that has some before it as the prompt, the assistant's next words as target."""
    turns = [turn for turn in turns_of(row) if turn[0] != "system"]
    places = [
        at
        for at in range(2, len(turns))
        if turns[at][0] == "assistant" and turns[at - 1][0] == "user" and turns[at - 1][1] and 0 < len(turns[at][1]) <= LONGEST
    ]
    if not places:
        return None
    at = rng.choice(places)
    earlier = rounds_of(turns[: at - 1])[-2 * branches :]
    return Example(row.id, "The conversation so far, in parts.", cut(earlier, branches, "\n"), turns[at - 1][1][:LONGEST], turns[at][1])


def question(row: Row, branches: int, rng: random.Random) -> Example | None:
    """The opening question, for live workers, in the words of `minips.generate`; the target is the assistant's reply."""
    turns = [turn for turn in turns_of(row) if turn[0] != "system"]
    if len(turns) < 2 or turns[0][0] != "user" or turns[1][0] != "assistant" or max(len(turns[0][1]), len(turns[1][1])) > LONGEST:
        return None
    asked = turns[0][1]
    return Example(row.id, asked, (), default_prompt(asked), turns[1][1], workers=("",) * branches)


def tool_results(row: Row, branches: int, rng: random.Random) -> Example | None:
    """Call and result pairs as branches, the user's question as prompt, the assistant's answer as target."""
    turns = turns_of(row)
    for at in range(len(turns) - 1, 1, -1):
        if turns[at][0] != "assistant" or turns[at - 1][0] not in ("observation", "result"):
            continue
        first = next((i for i in range(at - 1, -1, -1) if turns[i][0] == "user"), None)
        if first is None or not 0 < len(turns[at][1]) <= LONGEST:
            return None
        steps = turns[first + 1 : at]
        pairs = [f"Call: {call[:LONGEST]}\nResult: {result[:LONGEST]}" for (_, call), (_, result) in zip(steps[::2], steps[1::2])]
        before = rounds_of(turns[:first])[-branches:]
        parts = (*before[: max(0, branches - len(pairs))], *cut(pairs, branches, "\n")) if pairs else ()
        asked = turns[first][1][:LONGEST]
        return Example(row.id, f"Answer with the help of tools.\n{asked}", tuple(parts), asked, turns[at][1]) if parts else None
    return None


def planned_calls(row: Row, branches: int, rng: random.Random) -> Example:
    """Descriptions of functions as branches; the target is the list of calls that the question needs."""
    question = row.fields.get("question")
    try:
        asked = question[0][-1]["content"].strip()
        calls = [{name: {k: v[0] for k, v in args.items()}} for call in row.items("ground_truth", dict) for name, args in call.items()]
    except (TypeError, LookupError, AttributeError):
        row.refuse("question", "turns of messages, and ground_truth with lists of accepted values")
    functions = row.fields.get("function")
    functions = [functions] if isinstance(functions, dict) else row.items("function", dict)
    form = "Write the calls that are needed as a JSON list, nothing else."
    described = [json.dumps(function, ensure_ascii=False)[:LONGEST] for function in functions]
    return Example(row.id, f"Functions that can be called.\n{asked}", cut(described, branches, "\n"), f"{asked}\n{form}", json.dumps(calls))


def few_shot(source: Source, name: str, kind: str):
    """Other rows of the same kind (a field of the row) as solved examples, one or more a branch."""

    def build(folder: Path | None, branches: tuple[int, int], seed: int) -> Iterator[Example]:
        groups: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for row in read(source, folder):
            asked, answer = _task_pair(row)
            if len(asked) + len(answer) <= LONGEST:
                groups[row.label(kind)].append((f"{name}/{row.id}", asked, answer))
        for rows in groups.values():
            for at, (row_id, asked, answer) in enumerate(rows):
                rng = row_random(seed, row_id)
                count = min(rng.randint(*branches), len(rows) - 1)
                others = rng.sample(range(len(rows) - 1), count)
                shown = [rows[other + (other >= at)] for other in others]
                solved = tuple(f"{question}\nAnswer: {target}" for _, question, target in shown)
                if solved:
                    yield Example(row_id, "Solved examples of a task.", solved, f"{asked}\nAnswer as in the examples.", answer)

    return build


def _task_pair(row: Row) -> tuple[str, str]:
    """Question and answer of a row of P3 (input, target) or of FLAN (question, rationale, answer)."""
    if "input" in row.fields:
        return row.text("input").strip(), row.text("target").strip()
    return row.text("question").strip(), f"{row.text('rationale').strip()} The answer is {row.text('answer').strip()}."


DATA_SETS = [
    *(
        DataSet(name, 1, of_rows(source, name, dialogue), str(source))
        for name, source in (
            ("oasst", OASST),
            ("oasst_trees", OASST_TREES),
            ("sgd", SGD),
            ("ultrachat", ULTRACHAT),
            ("wildchat", WILDCHAT),
            ("lmsys_chat", LMSYS),
        )
    ),
    DataSet("oasst_questions", 3, of_rows(OASST, "oasst_questions", question), str(OASST)),
    DataSet("flan", 1, few_shot(FLAN, "flan", "task"), str(FLAN)),
    DataSet("p3", 1, few_shot(P3, "p3", "template"), str(P3)),
    DataSet("glaive", 2, of_rows(GLAIVE, "glaive", tool_results), str(GLAIVE)),
    DataSet("bfcl", 2, of_rows(BFCL, "bfcl", planned_calls), str(BFCL)),
]
