"""The tasks by name."""

from __future__ import annotations

import difflib

from ..errors import MinipsError, brief
from . import incidents, tasks_agents, tasks_reasoning, tasks_sources
from .data import select
from .example import Task

__all__ = ["TASKS", "register", "select", "task"]

TASKS: dict[str, Task] = {}


def register(task: Task) -> Task:
    """Add a task under its name; MinipsError where another one has that name."""
    if TASKS.setdefault(task.name, task) is not task:
        raise MinipsError(f"task {task.name!r} is there already")
    return task


def task(name: str) -> Task:
    """The task of this name; MinipsError with the nearest name where there is none."""
    if found := TASKS.get(name):
        return found
    wanted = str(name).lower().replace("-", "_")
    near = [known for known in TASKS if wanted and wanted in known] or difflib.get_close_matches(wanted, TASKS, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(TASKS)}"
    raise MinipsError(f"task {brief(name)}: there is none of this name; {hint}")


for _task in (*tasks_reasoning.TASKS, *tasks_agents.TASKS, *incidents.tasks(), *tasks_sources.TASKS):
    register(_task)
