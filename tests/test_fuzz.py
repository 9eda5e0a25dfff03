"""Hostile files and arguments: one clear error or a right result, never another exception, a hang, a crash, code that runs, or much memory.

Quick: all targets for two seconds each, in one process. Slow: a minute each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fuzz_targets import TARGETS

ROOT = Path(__file__).parent.parent


def run(targets, seconds):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    command = [sys.executable, "-m", "tests.fuzz_targets", ",".join(targets), str(seconds)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120 + 8 * seconds * len(targets), check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    findings = [f"{line['target']} {line['case']}: {line['found']}" for line in lines if "found" in line]
    ends = f"exit code {done.returncode}: {done.stderr[-2000:]}"  # the last case to be named is to blame
    assert done.returncode == 0 and not findings, "\n".join([*findings, ends])
    return {line["target"]: line["cases"] for line in lines}


def test_mutated_files_are_refused_or_right():
    cases = run(TARGETS, 2)
    assert set(cases) == set(TARGETS) and min(cases.values()) >= 3, cases


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_minute_of_one_target(target):
    assert run([target], 60)[target] > 100
