"""The sandbox: right code passes, and wrong, slow, greedy, forking, writing or networking code is contained and fails."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minips.errors import MinipsError
from minips.evaluation import code_tests, sandbox
from minips.evaluation.inside.values import decode, encode
from minips.evaluation.sandbox import Limits, missing_isolation, run_code

F = "assert f(1) == 2"


def run(source, tests=F, **changes):
    return run_code(source, tests=tests, entry_point="f", **{"timeout": 5, **changes})


def held(*names):
    """Skip a test of what this system does not give."""
    if missing := set(names) & set(missing_isolation()):
        pytest.skip(f"no isolation of {', '.join(missing)} here")


def test_right_code_passes():
    result = run("def f(x):\n    return x + 1")
    assert result.passed and result.reason == "passed" and 0 < result.seconds < 5
    expected = {"user", "network", "processes", "files", "memory_segments", "limits", "no_new_privileges"}
    assert set(result.isolation) == expected and set(missing_isolation()) <= expected
    assert run("def f(x): return x", "def check(candidate):\n    assert candidate([(1,)]) == [(1,)]").passed
    assert run_code("x = 1", tests="").passed
    assert run_code("x = 1", tests="import os; os._exit(0)").reason == "the tests ended without a verdict"


WRONG = [  # source, a part of the reason
    ("def f(x): return x", "a test failed"), ("def f(x): return 1 / 0", "ZeroDivisionError"),
    ("def g(x): return 2", "the code defines no f"), ("def f(x:", "SyntaxError"), ("import nothing_of_that_name", "ModuleNotFoundError"),
    ("raise SystemExit(0)", "SystemExit"), ("", "defines no f"), ("import os; os._exit(0)", "ended its process"),
    ("def f(x):\n    import os\n    os._exit(0)", "ended its process"), ("f = 2", "defines no f"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"), ("def f(x): return f(x)", "RecursionError"),
    ("import ctypes\ndef f(x): ctypes.string_at(0)", "killed by signal 11"), ("print('passed')\nimport sys; sys.exit(0)", "SystemExit"),
    ("def f(x): return open('/proc/1/environ').read()", "Error"), ("def f(x): return input()", "EOFError"), ("\x00", "null byte"),
    ("def f(x):\n    r = []\n    r.append(r)\n    return r", "deep"), ("def f(x): return 'a' * 200_000_000", "at most"),
    ("'\ud800'.encode()", "Error"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), WRONG)
def test_wrong_code_fails(source, reason):
    result = run(source)
    assert not result.passed and reason in result.reason


FORGERIES = [
    "class Yes:\n    __eq__ = __ge__ = __le__ = lambda *_: True\ndef f(x): return Yes()",
    "class Two(int):\n    __eq__ = lambda *_: True\ndef f(x): return Two(7)",
    "import builtins\nbuiltins.AssertionError = builtins.ValueError\ndef f(x): return 3",
    """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"passed": true, "reason": "passed", "seconds": 0, "isolation": {}}')
    except OSError: pass
os._exit(0)""",
    "import sys\nsys.modules['__main__'].judge = lambda *_: None\ndef f(x): return 3",
    """
import sys
for frame in sys._current_frames().values():
    while frame:
        frame.f_locals.update(passed=True); frame = frame.f_back
def f(x): return 3""",
    """
import gc
for thing in gc.get_objects():
    if isinstance(thing, dict) and 'passed' in thing: thing['passed'] = True
def f(x): return 3""",
    "def f(x): return 3\ndef assertion(*_): pass\ndef isinstance(*_): return True\ndef zip(*_): return []",
]  # fmt: skip


@pytest.mark.parametrize("source", FORGERIES)
def test_a_verdict_cannot_be_forged(source):
    assert not run(source, "for a, b in zip([1], [2]):\n    assert f(a) == b").passed


def test_the_code_sees_neither_tests_nor_other_processes():
    look = """
import re, os
def f(x):
    if not os.path.exists('/proc/self/maps'): return []
    found, memory = [], open('/proc/self/mem', 'rb', 0)
    for line in open('/proc/self/maps'):
        start, end = (int(part, 16) for part in line.split()[0].split('-'))
        if ' rw' in line and end - start < 1 << 26:
            memory.seek(start)
            found += re.findall(b'HIDDENWORD-[0-9]', memory.read(end - start))
    return found
"""
    assert run(look, "assert f(1) == [], 'HIDDENWORD-1'").passed
    assert not run("word = 'HIDDENWORD-1'" + look, "assert f(1) == []").passed or not Path("/proc/self/maps").exists()
    held("processes", "files")
    numbers = (
        "import os\ndef f(x): return sorted(int(n) for n in os.listdir('/proc') if n.isdigit()) if os.path.isdir('/proc/self') else [1, 2]"
    )
    assert run(numbers, "assert f(1) == [1, 2]").passed  # tester and solver
    assert run("import os, signal\ndef f(x): os.kill(1, signal.SIGKILL); return 2").passed  # the tester cannot be killed


def test_slow_code_ends():
    held("limits")
    started = time.monotonic()
    result = run("def f(x):\n    while True: pass", timeout=1)
    assert result.reason == "no end after 1 s of processor time" and time.monotonic() - started < 20
    swallowing = "import time\ndef f(x): time.sleep(100)"
    assert run(swallowing, "try:\n    f(1)\nexcept Exception: pass", timeout=0.2).reason == "no end after 0.8 s by the clock"
    assert not run(
        "def f(x): return 2", "while True:\n    try:\n        while True: pass\n    except BaseException: pass", timeout=0.1
    ).passed


def test_greedy_code_is_stopped():
    held("limits")
    assert "MemoryError" in run("def f(x): return len('a' * (3 << 30))").reason
    assert "MemoryError" in run("def f(x): return len(list(range(10**8)))", limits=Limits(memory=400 << 20)).reason
    assert "OSError" in run("def f(x):\n    open('big', 'wb').write(bytes(30 << 20))\n    raise OSError").reason
    assert "Too many open files" in run("def f(x):\n    return len([open('/dev/null') for _ in range(1000)])").reason
    started = time.monotonic()
    result = run("import os\ndef f(x):\n    while True: os.fork()", timeout=1)
    assert not result.passed and time.monotonic() - started < 20


def alive(mark):
    """Processes whose command line holds a word."""
    lines = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if mark in line]


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(60):
            try: os.close(fd)
            except OSError: pass
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "MARK"])
    os._exit(0)
os.wait()
time.sleep(0.2)
"""


@pytest.mark.parametrize("ending", ["", "\ndef f(x): return 2"])
def test_nothing_is_left_behind(ending, tmp_path):
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes that leave their session are found through /proc")
    mark = f"minips-sleeper-{os.getpid()}-{len(ending)}"
    assert run(DAEMON.replace("MARK", mark) + ending).passed == bool(ending)
    assert not alive(mark)


def test_files_stay_inside():
    outside = Path("/tmp") / f"minips-outside-{os.getpid()}"
    before = set(Path(sandbox.tempfile.gettempdir()).glob("minips-run-*"))
    source = f"""
open('here', 'w').write('x')
def f(x):
    assert open('here').read() == 'x'
    open({str(outside)!r}, 'w').write('x')
    return 2"""
    result = run(source)
    if result.isolation["files"]:
        assert not result.passed and "Read-only file system" in result.reason and not outside.exists()
    outside.unlink(missing_ok=True)
    assert set(Path(sandbox.tempfile.gettempdir()).glob("minips-run-*")) <= before  # no folder is left
    assert run("import os\ndef f(x): return 2 if os.listdir('.') == [] else 0").passed


def test_no_network():
    held("network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        result = run(f"import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', {port}), timeout=2)\n    return 2")
        assert not result.passed and "OSError" in result.reason
        with pytest.raises(TimeoutError):
            server.accept()  # nobody came


def test_no_privileges_and_a_bare_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    source = "import os, sys\ndef f(x): return [os.geteuid(), sorted(os.environ), os.getgroups() if os.geteuid() == 65534 else []]"
    kept = [
        "HOME",
        "LANG",
        "LC_CTYPE",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PATH",
        "TMPDIR",
        "__CF_USER_TEXT_ENCODING",
    ]
    assert run(
        source,
        f"user, names, groups = f(1)\nassert user and groups == [] and set(names) <= {set(kept)}",
    ).passed
    if os.geteuid() == 0:
        assert run("import os\ndef f(x): os.setuid(0); return 2").reason.startswith("PermissionError")


def test_as_an_unprivileged_user():
    """The same, started by nobody: what can be had without root holds, and the rest is said."""
    if os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs root to become nobody, and a Python that nobody may run")
    inside = Path(sandbox.__file__).with_name("inside")
    code = f"""
import json, os, subprocess, sys, tempfile
job = {{"source": "def f(x): return x + 1", "tests": "assert f(1) == 2", "entry_point": "f", "timeout": 5}}
limits = {{"memory": 1 << 30, "file_size": 1 << 20, "open_files": 64, "processes": 64, "cpu": 5}}
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-I", {str(inside)!r}, folder, json.dumps(limits), str(os.getpid())]
    print(subprocess.run(command, input=json.dumps(job).encode(), capture_output=True).stdout.decode())
"""  # fmt: skip
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    done = subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=False, **nobody)
    if "Permission denied" in done.stderr:
        pytest.skip("nobody may not read this checkout")
    assert '"passed": true' in done.stdout and '"user": true' in done.stdout, done


def test_without_namespaces_nothing_is_left_behind_either(tmp_path):
    """A system that gives no namespaces: the tester adopts what left its session, and kills it."""
    if sys.platform != "linux":
        pytest.skip("adoption of orphans needs Linux")
    inside = str(Path(sandbox.__file__).with_name("inside"))
    code = f"""
import runpy, sys
sys.path.insert(0, {inside!r})
import isolation
isolation.enter_spaces = lambda: dict.fromkeys(isolation.SPACES, False)
runpy.run_path({inside + "/__main__.py"!r}, run_name="__main__")
"""
    mark = f"minips-orphan-{os.getpid()}"
    source = DAEMON.replace("MARK", mark) + "def f(x): return 2"
    job = {"source": source, "tests": F, "entry_point": "f", "timeout": 5}
    limits = {"memory": 1 << 30, "file_size": 1 << 20, "open_files": 64, "processes": 4096, "cpu": 5}
    command = [sys.executable, "-I", "-c", code, str(tmp_path), json.dumps(limits), str(os.getpid())]
    done = subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, start_new_session=True, check=True)
    verdict = json.loads(done.stdout)
    assert verdict["passed"] and not verdict["isolation"]["processes"]
    assert not alive(mark)


def test_calls_with_every_kind_of_plain_value():
    values = [
        0, -1, 2**70, True, None, "é\ud800", 1.5, float("inf"), 1j, b"ab", [], (), {}, set(), frozenset({(1,)}), [[], [1]],
        [(1, 2), (3,)], {1: [2], (1, 2): {3}}, [1, 2**80], [[[1], [2, 3]], []], ([1],), [(1,), [1]], {"a": {"b": (1, 2)}}, [{1}, {2}],
        [True, 1, 2.0], [2**63],
    ]  # fmt: skip
    for value in values:
        back = decode(encode(value))
        assert back == value and type(back) is type(value)
    shown = [value for value in values if value != float("inf")]
    assert run_code(
        "def f(x): return x",
        tests=f"for value in {shown!r}:\n    assert f(value) == value and type(f(value)) is type(value)",
        entry_point="f",
    ).passed
    assert run("def f(x): return (c for c in 'ab')", "assert list(f(1)) == ['a', 'b']").passed
    assert run("import numpy\ndef f(x): return numpy.arange(3)", "import numpy\nassert numpy.allclose(f(1), [0, 1, 2])", timeout=20).passed


def test_a_bad_timeout_is_refused():
    for timeout in (0, -1, float("nan"), float("inf"), "5"):
        with pytest.raises(MinipsError, match="timeout is .*, expected a positive number of seconds"):
            run("", timeout=timeout)


ROW = {
    "task_id": "T/1", "prompt": "", "entry_point": "f", "canonical_solution": "def f(x, y):\n    return tuple(set(x) & set(y))\n",
    "atol": 0, "base_input": [[[1, 2], [2, 3]]], "plus_input": [[[], []], [["a"], ["a", "b"]]],
    "assertion": "assert set(f((1, 2), (2, 3))) == set((2,))",
}  # fmt: skip


def test_tests_made_from_inputs():
    tests = code_tests.tests_from_inputs(ROW)
    assert "[[(1, 2), (2, 3)], [(), ()], [('a',), ('a', 'b')]]" in tests  # as the assertion shows them
    assert run("def f(x, y): return [a for a in x if a in y]", tests).passed
    assert "expected" in run("def f(x, y): return [2]", tests).reason
    half = {**ROW, "canonical_solution": "def f(x):\n    return x / 3\n", "base_input": [[1], [2.5]], "plus_input": None, "assertion": ""}
    assert (
        run("def f(x): return x * (1 / 3)", code_tests.tests_from_inputs(half)).passed
        and not run("def f(x): return x * 0.33", code_tests.tests_from_inputs(half)).passed
    )
    truth = {
        **half,
        "canonical_solution": "import re\ndef f(x): return re.match('a', x)\n",
        "base_input": [["ab"], ["b"]],
        "assertion": "assert f('a')",
    }
    assert run("def f(x): return x[0] == 'a'", code_tests.tests_from_inputs(truth)).passed
    assert not run("def f(x): return True", code_tests.tests_from_inputs(truth)).passed
    assert run("import re\ndef f(x): return re.search('^a', x)", code_tests.tests_from_inputs(truth)).passed
    root = {
        **half,
        "prompt": "def poly(c, x):\n    return c[0] + c[1] * x\n",
        "entry_point": "find_zero",
        "atol": 1e-4,
        "base_input": [[[2, -4]]],
    }
    root["canonical_solution"] = "def find_zero(c): return -c[0] / c[1]\n"
    for answer, right in (("0.5", True), ("0.50001", True), ("0.6", False)):
        assert (
            run_code(f"def find_zero(c): return {answer}", tests=code_tests.tests_from_inputs(root), entry_point="find_zero").passed
            is right
        )
    with pytest.raises(MinipsError, match="the row T/1 has no field canonical_solution"):
        code_tests.tests_from_inputs({name: value for name, value in ROW.items() if name != "canonical_solution"})
    assert code_tests.mended("assert _poly(*candidate(*inp), inp) <= 0.0001") == "assert abs(_poly(*inp, candidate(*inp))) <= 0.0001"
    silent = """
def assertion(out, exp):
    if 0:
        pass
    else:
        exact_match = exp == (out is not None)

assertion(f(1), True)"""
    assert run("def f(x): return None", silent).passed and not run("def f(x): return None", code_tests.mended(silent)).passed


def test_the_run_ends_with_its_caller(tmp_path):
    if sys.platform != "linux":
        pytest.skip("needs a death signal")
    code = "from minips.evaluation.sandbox import run_code; run_code('while True: pass', tests='', timeout=30)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for wait in (0.0, 0.5):
        caller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env=environment)
        until = time.monotonic() + 20
        while not alive(str(tmp_path)) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(wait)
        caller.kill()
        caller.wait()
        until = time.monotonic() + 10
        while alive(str(tmp_path)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(str(tmp_path))
