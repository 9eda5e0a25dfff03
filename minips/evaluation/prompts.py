"""The words of the tasks: T of the shared prefix, which the workers read, and U, which the synthesizer reads.

The question stands in both: small models read it best so. Nothing here depends on the method: `text` and every method that
reads caches get the same T and U. Sentences are short and plain, because the models that read them may be small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FINDINGS = "The findings of earlier workers stand above. Compare them and give one final answer."


def _pair(question: str, work: str, answer: str, findings: str = FINDINGS) -> tuple[str, str]:
    """T and U: what the workers are asked, and what the synthesizer is asked about the same question."""
    return f"{question}\n\n{work}", f"{findings}\n\n{question}\n\n{answer}"


def maths(problem: str, form: str = "the final answer") -> tuple[str, str]:
    """T and U of a mathematical problem; `form` says what goes into the box."""
    box = f"{form} in \\boxed{{}}."
    return _pair(f"Problem: {problem.strip()}", f"Solve the problem step by step. Give {box}", f"Give {box}")


def choice(question: str, options: Mapping[str, str]) -> tuple[str, str]:
    """T and U of a multiple-choice question; `options` maps each letter to its text."""
    lines = [f"{letter}. {text.strip()}" for letter, text in options.items()]
    asked = "\n".join([f"Question: {question.strip()}", *lines])
    box = "the letter of the correct option in \\boxed{}."
    return _pair(asked, f"Think step by step. Give {box}", f"Give {box}")


def function_stub(stub: str) -> tuple[str, str]:
    """T and U where the head of a Python function is given."""
    asked = f"Complete this Python function:\n\n{python_block(stub)}"
    return _pair(asked, *_CODE)


def function_described(description: str, tests: Sequence[str]) -> tuple[str, str]:
    """T and U where a function is described and must pass the tests that are shown."""
    shown = "\n".join(tests)
    return _pair(f"{description.strip()}\nThe function must pass these tests:\n\n{python_block(shown)}", *_CODE)


_BLOCK = "Give the complete function, with its imports, in one Python code block."
_CODE = (f"Think about what the function must do. {_BLOCK}", _BLOCK)


def python_block(code: str) -> str:
    """Code as one Markdown block."""
    return f"```python\n{code.strip(chr(10))}\n```"


def assistant_task(question: str, attachment: str) -> tuple[str, str]:
    """T and U of a question that may need tools; `attachment`: the name of a file that belongs to it, or ""."""
    asked = f"Question: {question.strip()}" + (f"\nAttached file: {attachment}" if attachment else "")
    form = "Write the answer alone, as short as possible, as <answer>ANSWER</answer>."
    findings = (
        "The findings of earlier workers stand above. Prefer an answer that several workers agree on, else the one with the best support. "
        "Use a tool only where nobody found a plausible answer."
    )
    return _pair(asked, f"Reason step by step. {form}", form, findings)


def diagnosis(brief: str, labels: Sequence[str], most: int) -> tuple[str, str]:
    """T and U of a database diagnosis; `most`: how many labels may be named."""
    causes = f"Possible root causes: {', '.join(labels)}"
    asked = f"{brief.strip()}\n{causes}"
    work = "You look at one part of the database. Report what you find there and which root cause it speaks for or against."
    form = f'Name at most {most} root causes. Give a short reason, then a JSON list as <answer>["CAUSE", ...]</answer>.'
    return _pair(asked, work, form)


# Given passages. Instruction first: it is the form that the measurements in bench/RESULTS.md use.


def passages_question(question: str) -> tuple[str, str]:
    """T and U of a question that the given passages answer."""
    asked = f"Question: {question.strip()}"
    return f"Answer the question with the help of the passages.\n{asked}", f"{asked}\nAnswer the question in a few words."


def facts_question(question: str) -> tuple[str, str]:
    """T and U of a yes-or-no question that the given facts answer."""
    asked = f"Question: {question.strip()}"
    return f"Answer the question with the help of the facts.\n{asked}", f"{asked}\nAnswer yes or no."


def key_question(key: str) -> tuple[str, str]:
    """T and U of the value of one key among given pairs."""
    asked = f"Question: What is the value of the key {key}?"
    return f"Find the value of a key among the given pairs.\n{asked}", f"{asked}\nAnswer with the value alone."
