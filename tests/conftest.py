"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from minips.errors import MinipsError
from minips.hub import DEFAULT_MODEL, resolve_model

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: tests of Ctrl-C would wait for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched on first use; without a network the test is skipped, except under CI."""
    try:
        return resolve_model(DEFAULT_MODEL)
    except MinipsError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
