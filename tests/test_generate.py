"""The command line: what it prints where, its exit codes, and one clear line for every mistake. FAULTS items 46, 47, 60."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from minips import Engine
from minips.generate import main
from minips.record import RECORD_FIELDS
from minips.screen import Screen

from .support import chat_engine

TASK = "Name one way to keep a house cool."
SHORT = ["--workers", "2", "--worker-tokens", "12", "--max-tokens", "12"]


@pytest.fixture
def tiny(monkeypatch):
    """Runs use a tiny random model, which is quick and needs no download."""
    engine = chat_engine()
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setattr("minips.shipped.weights_folders", lambda: [])  # the shipped adapter is for the real model
    return engine


def run(capsys, *argv):
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([""], "TASK is empty"),
        (["  \n"], "TASK is empty"),
        (["x", "--workers", "0"], "--workers is 0"),
        (["x", "--workers", "-3"], "--workers is -3"),
        (["x", "--workers", "3", "--worker-prompt", "a"], "--workers is 3, but --worker-prompt was given 1 time"),
        (["x", "--temperature", "-1"], "--temperature is -1.0"),
        (["x", "--temperature", "nan"], "--temperature is nan"),
        (["x", "--answer-temperature", "-2"], "--answer-temperature is -2.0"),
        (["x", "--top-p", "1.5"], "--top-p is 1.5"),
        (["x", "--top-k", "-1"], "--top-k is -1"),
        (["x", "--min-p", "7"], "--min-p is 7"),
        (["x", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["x", "--seed", "-1"], "--seed is -1"),
        (["x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["x", "--worker-tokens", "0"], "--worker-tokens is 0"),
        (["x", "--stop", ""], "--stop is"),
        (["x", "--model", "/no/such/folder"], "/no/such/folder"),
        (["x", "--model", ""], "--model is empty"),
        (["x", "--model", "nonsense"], "'nonsense' was not found"),
        (["x", "--model", "{empty}"], "config.json: no such file"),
        (["x", "--model", "{file}"], "is a file, expected a model folder"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_1(capsys, tmp_path, argv, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    argv = [part.format(empty=tmp_path / "empty", file=tmp_path / "file") for part in argv]
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == "" and message in err
    assert err.startswith("minips: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["x", "--no-such-flag"], ["x", "--workers", "two"], ["x", "--method", "magic"], ["x", "y"]])
def test_bad_usage_is_exit_code_2(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.endswith("; --help lists the arguments\n")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dtype", "float8"], "error: dtype is 'float8'"),
        (["--kv-dtype", "float8"], "error: kv_dtype is 'float8'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--max-kv-tokens", "100"], "a run of 2 workers and a synthesizer needs"),
        (["--workers", "20000"], "a run of 20000 workers and a synthesizer needs"),
        (["--adapter", "nonsense"], "adapter 'nonsense' was not found"),
    ],
)
def test_mistakes_that_need_the_model(capsys, default_model, argv, message):
    code, out, err = run(capsys, TASK, "--quiet", *SHORT[2:], *(argv if "--workers" in argv else ["--workers", "2", *argv]))
    assert code == 1 and out == "" and message in err and err.count("\n") == 1


def test_a_task_beyond_the_context_is_refused(capsys, default_model):
    code, out, err = run(capsys, "heat " * 9000, "--quiet", "--max-kv-tokens", "60000", *SHORT)
    assert code == 1 and out == "" and "the model's limit is 8192" in err


def test_the_answer_alone_goes_to_stdout(capsys, default_model):
    code, answer, err = run(capsys, TASK, *SHORT)
    assert code == 0 and answer.strip() and "\ufffd" not in answer
    for part in ("135M parameters", "bfloat16", "worker 1:", "worker 2:", "tokens/s", "TTFT", "from caches"):
        assert part in err
    code, quiet, err = run(capsys, TASK, "--quiet", *SHORT)
    assert code == 0 and quiet == answer and err == ""


def test_one_of_each_is_no_plural(capsys, tiny):
    for method, words in (
        ("parallel", "from 1 cache\n"),
        ("text", "the text of 1 worker, 1 token, again"),
        ("best-of-n", "of 1 worker, 1 different"),
    ):
        err = run(capsys, TASK, "--workers", "1", "--worker-tokens", "1", "--max-tokens", "1", "--method", method)[2]
        assert "\n1 worker, " in err and "up to 1 token together" in err and words in err and " 1 tokens" not in err, err


def test_json_is_one_object_that_holds_everything(capsys, tiny):
    prompts = ["--worker-prompt", "Think of plants.", "--worker-prompt", "Think of windows."]
    argv = [TASK, "--json", "--quiet", *SHORT[2:], *prompts, "--stop", "zzz"]
    code, out, err = run(capsys, *argv)
    found = json.loads(out)
    assert code == 0 and err == "" and found["method"] == "parallel" and set(found) == set(RECORD_FIELDS)
    workflow = found["workflow"]
    assert workflow["branches"] == [{"prompt": "Think of plants."}, {"prompt": "Think of windows."}]
    assert found["answer"] and len(found["workers"]) == 2 and workflow["synthesizer"]["sampling"]["stop"] == ["zzz"]
    parts = {"prefix", "workers", "total", "rerotate", "map", "prefill", "first_token", "decode"}
    assert found["ttft"] > 0 and set(found["timings"]) == parts and list(found["timings"])[-1] == "total"
    assert found["seeds"]["workers"] == [[worker["seed"]] for worker in found["workers"]] and found["seeds"]["answer"] == 0
    assert found["model"]["dtype"] == "float32" and workflow["engine"]["page_size"] == found["model"]["page_size"] == 4


def test_ctrl_c_is_exit_code_130_without_a_traceback(capsys, tiny, monkeypatch):
    for where in ("worker_token", "answer"):
        with monkeypatch.context() as patched:
            patched.setattr(Screen, where, lambda *_: signal.raise_signal(signal.SIGINT))
            code, out, err = run(capsys, TASK, *SHORT)
        assert code == 130 and out == "" and err.endswith("\nminips: interrupted\n") and "workers," in err
        assert tiny.stats()["used_pages"] == 0 and tiny.check()


def test_a_second_ctrl_c_while_the_first_is_told_is_clean_too(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("minips.generate.run", interrupted)
    monkeypatch.setattr("minips.generate.print", interrupted, raising=False)
    assert main([TASK]) == 130 and signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(sys, "argv", ["minips", TASK])
    try:
        assert main() == 130 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_streams_that_are_closed_or_full(capfd, tiny, monkeypatch, more):
    read, write = os.pipe()
    os.close(read)
    full = "minips: error: the output cannot be written (No space left on device)\n"
    for target, message in ((write, ""), (os.open("/dev/full", os.O_WRONLY), full)):
        with monkeypatch.context() as patched, open(target, "w") as stream:
            patched.setattr(sys, "stdout", stream)
            assert main([TASK, "--quiet", *SHORT, *more]) == 1
        assert capfd.readouterr().err == message
    monkeypatch.setattr(sys, "stderr", None)
    assert main([TASK, *SHORT]) == 0 and capfd.readouterr().out.strip()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["x", "--model", "a" * 5000], "File name too long"),
        (["x", "--model", "~nosuchuser/x"], "cannot be looked up"),
        (["x", "--stop", "\udcff"], r"--stop is not valid text: '\udcff'"),
        (["bad \udcff"], r"TASK is not valid text"),
    ],
)
def test_odd_names_and_text(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == "" and message in err and err.count("\n") == 1


def test_a_kv_cache_beyond_memory_is_refused(capsys, default_model):
    code, _, err = run(capsys, TASK, "--quiet", *SHORT, "--max-kv-tokens", "9" * 14)
    assert code == 1 and "cannot be allocated; lower max_kv_tokens" in err and err.count("\n") == 1


def test_ctrl_c_during_start_up_is_clean_too(default_model):
    command = [sys.executable, "-m", "minips.generate", TASK, *SHORT]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(0.6)  # torch is being imported
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in err, err
