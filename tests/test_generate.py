"""The command line: what it prints where, its exit codes, and one clear line for every mistake. FAULTS items 46, 47, 60."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from minips.generate import main
from minips.record import RECORD_FIELDS

TASK = "Name one way to keep a house cool."
SHORT = ["--workers", "2", "--worker-tokens", "12", "--max-tokens", "12"]


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
        (["x", "--workers", "3", "--worker-prompt", "a"], "--workers is 3, but --worker-prompt was given 1 times"),
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
        (["--dtype", "float8"], "dtype is 'float8'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--max-kv-tokens", "100"], "a run of 2 workers and a synthesizer needs"),
        (["--workers", "5000"], "a run of 5000 workers and a synthesizer needs"),
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


def test_json_is_one_object_that_holds_everything(capsys, default_model):
    prompts = ["--worker-prompt", "Think of plants.", "--worker-prompt", "Think of windows."]
    argv = [TASK, "--json", "--quiet", *SHORT[2:], *prompts, "--stop", "zzz"]
    code, out, err = run(capsys, *argv)
    found = json.loads(out)
    assert code == 0 and err == "" and found["method"] == "parallel" and set(found) == set(RECORD_FIELDS)
    workflow = found["workflow"]
    assert workflow["branches"] == [{"prompt": "Think of plants."}, {"prompt": "Think of windows."}]
    assert found["answer"] and len(found["workers"]) == 2 and workflow["synthesizer"]["sampling"]["stop"] == ["zzz"]
    parts = {"prefix", "workers", "total", "rerotate", "map", "prefill", "first_token", "decode"}
    assert found["ttft"] > 0 and set(found["timings"]) == parts
    assert found["seeds"]["workers"] == [[worker["seed"]] for worker in found["workers"]] and found["seeds"]["answer"] == 0
    assert found["model"]["dtype"] == "bfloat16" and workflow["engine"]["page_size"] == found["model"]["page_size"] == 16


def command(*argv, **options):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-m", "minips.generate", *argv], env=environment, stderr=subprocess.PIPE, text=True, **options)


def test_ctrl_c_is_exit_code_130_without_a_traceback(default_model):
    process = command(TASK, "--worker-tokens", "2000", stdout=subprocess.PIPE)
    lines = []
    while "workers," not in (lines[-1] if lines else ""):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err and err.endswith("interrupted\n")


def test_a_closed_stdout_and_stdin_give_no_traceback(default_model):
    read, write = os.pipe()
    os.close(read)
    process = command(TASK, "--quiet", *SHORT, stdout=write, stdin=subprocess.DEVNULL)
    os.close(write)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in err and "Exception" not in err


@pytest.mark.parametrize(
    "argv, options, message",
    [
        (["x", "--model", "a" * 5000], {}, "File name too long"),
        (["x", "--model", "~nosuchuser/x"], {}, "cannot be looked up"),
        (["x", "--stop", "\udcff"], {}, r"--stop is not valid text: '\udcff'"),
        (["bad \udcff"], {}, r"TASK is not valid text"),
    ],
)
def test_odd_names_and_text(capsys, argv, options, message):
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == "" and message in err and err.count("\n") == 1


def test_a_kv_cache_beyond_memory_is_refused(capsys, default_model):
    code, _, err = run(capsys, TASK, "--quiet", *SHORT, "--max-kv-tokens", "9" * 14)
    assert code == 1 and "cannot be allocated; lower max_kv_tokens" in err and err.count("\n") == 1


def test_a_full_disk_a_poor_terminal_and_a_closed_stderr(default_model):
    with open("/dev/full", "w") as full:
        process = command(TASK, "--quiet", *SHORT, stdout=full)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and err == "minips: error: the output cannot be written (No space left on device)\n"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "ascii"}
    shell = f"{sys.executable} -m minips.generate 'hi' --system '\U0001f600' --json {' '.join(SHORT)} 2>&-"
    done = subprocess.run(["bash", "-c", shell], env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["workflow"]["system"]


def test_ctrl_c_during_start_up_is_clean_too(default_model):
    process = command(TASK, *SHORT, stdout=subprocess.PIPE)
    time.sleep(0.6)  # torch is being imported
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in err, err
