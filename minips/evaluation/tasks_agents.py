"""Tasks whose workers use tools: gaia and database_diagnosis. What the tools are is said by `agents.py`, not here."""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import prompts
from .data import Row, Source, loader
from .example import Example, Task
from .scoring import extract_gaia, extract_labels, score_gaia, score_labels

GAIA = Source(
    ("gaia/metadata", "gaia/2023/validation/metadata"),
    "accept the terms of the hub data set gaia-benchmark/GAIA and copy 2023/validation/metadata.jsonl and the attachments beside it there",
    "no licence stated; its owners ask that it is not shared again in a form that crawlers can read",
    ids=("task_id",),
    hub="gaia-benchmark/GAIA",
    hub_files=("2023/validation/metadata.jsonl",),
    hub_extra=("2023/validation/*",),
    gated=True,
)
MARBLE_DB = Source(
    ("marble_db/database_main",),
    "copy multiagentbench/database/database_main.jsonl of github.com/ulab-uiuc/MARBLE there",
    "MIT",
    ids=("task_id",),
)
_PLANNING = re.compile(r"\s*(Use sql queries|The root cause can be|The planner should)", re.IGNORECASE)


def gaia(row: Row, seed: int) -> Example:
    """meta: level, file_name ("" for none) and folder, where the attachments lie. Rows of the test split have no answers."""
    question, answer, attachment = row.text("Question"), row.text("Final answer").strip(), row.label("file_name")
    if answer == "?":
        row.refuse("Final answer", "an answer (the validation split has them)")
    if attachment and not (Path(attachment).name == attachment and (row.path.parent / attachment).is_file()):
        row.refuse("file_name", f"a file beside {row.path.name}")
    level = row.text("Level")
    prefix, prompt = prompts.assistant_task(question, attachment)
    meta = {"level": level, "file_name": attachment, "folder": str(row.path.parent)}
    return Example(row.id, question, prefix, prompt, (answer,), f"<answer>{answer}</answer>", group=f"level {level}", meta=meta)


def database_diagnosis(row: Row, seed: int) -> Example:
    """One worker prompt an agent: its profile. meta: labels, root_causes, number_of_labels_pred, init_sql, anomalies."""
    task = row.get("task", dict, "an object with content, labels, root_causes, number_of_labels_pred")
    environment = row.get("environment", dict, "an object with init_sql and anomalies")
    profiles = [agent.get("profile") for agent in row.items("agents", dict)]
    labels, causes, most, content = (task.get(name) for name in ("labels", "root_causes", "number_of_labels_pred", "content"))
    lists = all(isinstance(value, list) and value and all(isinstance(x, str) for x in value) for value in (profiles, labels, causes))
    if not lists or not set(causes) <= set(labels) or type(most) is not int or most < 1 or not isinstance(content, str):
        row.refuse("task", "content, labels, root_causes among them and number_of_labels_pred, and agents with a profile each")
    if not isinstance(environment.get("init_sql"), str) or not isinstance(environment.get("anomalies"), list):
        row.refuse("environment", "an object with init_sql and anomalies")
    question = _PLANNING.split(content, maxsplit=1)[0].strip()
    prefix, prompt = prompts.diagnosis(question, labels, most)
    target = f"<answer>{json.dumps(causes)}</answer>"
    meta = {"labels": labels, "root_causes": causes, "number_of_labels_pred": most}
    meta |= {name: environment[name] for name in ("init_sql", "anomalies")}
    group = " + ".join(sorted(causes))
    return Example(row.id, question, prefix, prompt, tuple(causes), target, worker_prompts=tuple(profiles), group=group, meta=meta)


TASKS = [
    Task(
        "gaia", "accuracy", loader(GAIA, gaia), score_gaia, extract_gaia, workers=3, worker_tokens=1024, agents=True, source=str(GAIA)
    ),
    Task(
        "database_diagnosis", "accuracy", loader(MARBLE_DB, database_diagnosis), score_labels, extract_labels,
        workers=5, agents=True, source=str(MARBLE_DB),
    ),
]  # fmt: skip
