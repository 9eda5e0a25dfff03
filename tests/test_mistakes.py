"""What a user can get wrong at the command line: one clear line, the right exit code, no traceback, nothing on stdout."""

import io
import os
import subprocess
import sys
import types

import pytest

from minips.generate import main

REFUSED = [  # exit code 1, before a model is looked for
    ([""], "TASK is empty"),
    ([" \t\n"], "TASK is empty"),
    (["bad \udcff byte"], r"TASK is not valid text: 'bad \udcff byte'"),
    (["x", "--system", "\udc80"], "--system is not valid text"),
    (["x", "--worker-prompt", "\udc80"], "--worker-prompt is not valid text"),
    (["x", "--workers", "0"], "--workers is 0, expected from 1 to 65536"),
    (["x", "--workers", "1000000000000"], "--workers is 1000000000000, expected from 1 to 65536"),
    (["x", "--workers", "2", "--worker-prompt", "a"], "--workers is 2, but --worker-prompt was given 1 time"),
    (["x", "--temperature", "-1"], "--temperature is -1.0, expected a number from 0 to 1000000"),
    (["x", "--temperature", "inf"], "--temperature is inf"),
    (["x", "--top-p", "nan"], "--top-p is nan, expected a number from 0 to 1"),
    (["x", "--seed", "99999999999999999999"], "--seed is 99999999999999999999"),
    (["x", "--max-tokens", "-5"], "--max-tokens is -5, expected an integer of at least 1"),
    (["x", "--page-size", "9999"], "--page-size is 9999, expected an integer from 1 to 4096"),
    (["x", "--max-kv-tokens", "0"], "--max-kv-tokens is 0, expected a positive integer"),
    (["x", "--device", ""], "--device is empty"),
    (["x", "--model", " "], "--model is empty"),
    (["x", "--adapter", ""], "--adapter is empty"),
    (["x", "--merge", "layout"], "--merge is 'layout', expected NAME=VALUE"),
    (["x", "--merge", "layot=parallel"], "--merge: unknown field 'layot'; did you mean 'layout'?"),
    (["x", "--merge", "layout=round"], "--merge layout is 'round', expected one of parallel, sequential"),
    (["x", "--merge", "rerotate=maybe"], "--merge rerotate is 'maybe', expected one of true, false"),
    (["x", "--merge", "branch_scale=NaN"], "--merge branch_scale is nan, expected a number from 0 to 100"),
    (["x", "--merge", "anchor=zero"], "anchor 'zero' cannot be combined with keep_prefix=True"),
    (["x", "--method", "text", "--adapter", "a"], "--adapter is given, but --method text uses none"),
    (["x", "--method", "naive", "--merge", "rerotate=true"], "merge.rerotate is true, expected false, which is what method naive means"),
    (["x", "--workflow", "samples"], "--workflow and TASK cannot be combined"),
    (["--workflow", "samples", "--workers", "3"], "--workflow and --workers cannot be combined"),
    (["--workflow", "samples", "--worker-prompt", "a"], "--workflow and --worker-prompt cannot be combined"),
    (["x", "--interactive"], "--interactive and TASK cannot be combined"),
    (["--interactive", "--workflow", "samples"], "--interactive and --workflow cannot be combined"),
    (["--interactive", "--json"], "--interactive and --json cannot be combined"),
    (["--interactive", "--method", "text"], "--interactive answers by method parallel only"),
    (["x", "--json", "--print-workflow"], "--json and --print-workflow cannot be combined"),
    (["--workflow", "sample"], "no such file, and no packaged example; did you mean 'samples'?"),
    (["--workflow", "nothing.json"], "packaged: documents, samples, subtasks, trajectories"),
    (["--workflow", ""], "--workflow is empty"),
    (["--workflow", "{folder}"], "Is a directory"),
    (["--workflow", "a\0b"], "cannot be read"),
    (["--workflow", "b" * 5000], "File name too long"),
    (["--workflow", "{folder}/a\nb\x1b[2J"], r"/a\nb\x1b[2J: is not readable as JSON"),
    (["--workflow", "documents", "--method", "best-of-n"], "branches[0] has a given output"),
    (["x", "--model", "/no/such/folder"], "model '/no/such/folder' was not found"),
    (["x", "--model", "nonsense", "--quiet"], "model 'nonsense' was not found"),
    (["x", "--model", "{folder}", "--quiet"], "config.json: no such file"),
]

BAD_FILES = [
    (b"", "is not readable as JSON"),
    (b"   ", "is not readable as JSON"),
    (b"{", "is not readable as JSON"),
    (b'{"prefix": "x",}', "is not readable as JSON"),
    (b"prefix: x\n", "is not readable as JSON"),
    (b"[]", "is a list of 0, expected an object"),
    (b'"x"', "is 'x', expected an object"),
    (b'{"prefix": "x", "prefix": "y"}', "the field 'prefix' stands twice in one object"),
    (b'{"prefix": "x", "sampling": {"seed": 1, "seed": 2}}', "the field 'seed' stands twice"),
    (b'{"prefix": "x", "sampling": {"top_p": NaN}}', "holds NaN, which is no JSON number"),
    (b'{"prefix": "x", "sampling": {"top_p": -Infinity}}', "holds -Infinity"),
    (b'{"prefix": "x", "sampling": {"temperature": 1e999}}', "sampling.temperature is inf"),
    (b'{"prefix": "x", "sampling": {"seed": 1' + b"0" * 5000 + b"}}", "is not readable as JSON (Exceeds the limit"),
    (b'{"prefix": "x", "sampling": {"seed": 1' + b"0" * 400 + b"}}", "sampling.seed is 1000"),
    (b'{"prefix": ' + b"[" * 200000, "is nested too deeply"),
    (b'{"prefix": ' + b"[" * 400 + b"]" * 400 + b"}", "prefix[0] is a list of 1, expected an object"),
    (b"\x7fELF\x02\x01\x00\xff\xfe", "is no UTF-8 text (byte 7)"),
    ('{"prefix": "x"}'.encode("utf-16"), "is no UTF-8 text (byte 0)"),
    (b'{"prefix": "\xe9"}', "is no UTF-8 text (byte 12)"),
    (b'{"prefix": "\\ud800"}', r"prefix is not valid text: '\ud800'"),
    (b'{"prefix": "x", "branches": [{}, {"sampling": {"top_p": 1.5}}]}', "branches[1].sampling.top_p is 1.5, expected a number from 0 to 1"),
    (b'{"prefix": [{"role": "assistent", "content": "x"}]}', "prefix[0].role is 'assistent'"),
    (b'{"prefix": "x", "branchs": []}', "unknown field 'branchs'; did you mean 'branches'?"),
    (b'{"prefix": "x", "\\u001b[31m": 1}', r"unknown field '\x1b[31m'"),
    (b'{"workflow": {"prefix": "x", "method": "magic"}, "answer": "y"}', "workflow.method is 'magic', expected one of"),
    (b'{"workflow": 3}', "unknown field 'workflow'"),
]  # fmt: skip


def refuse(capsys, argv, message, code=1):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("minips: error: ") and err.count("\n") == 1 and len(err) < 500, err


@pytest.mark.parametrize("argv, message", REFUSED)
def test_refused_arguments(capsys, tmp_path, argv, message):
    (tmp_path / "a\nb\x1b[2J").touch()
    refuse(capsys, [part.format(folder=tmp_path) for part in argv], message)


@pytest.mark.parametrize("content, message", BAD_FILES)
def test_bad_workflow_files(capsys, tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    refuse(capsys, ["--workflow", str(path)], message)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "TASK is missing"),
        (["x", "y"], "unrecognized arguments: y"),
        (["x", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["x", "--workers"], "--workers: expected one argument"),
        (["x", "--workers", "two"], "--workers: invalid int value: 'two'"),
        (["x", "--top-p", "much"], "--top-p: invalid float value: 'much'"),
        (["x", "--seed", "soon"], "--seed: invalid seed value: 'soon'"),
        (["x", "--method", "magic"], "--method: invalid choice: 'magic'"),
        (["x", "--worker", "3"], "ambiguous option: --worker could match"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "stdin, message",
    [
        (None, "standard input is closed"),
        (b"", "TASK (read from standard input) is empty"),
        (b" \n\n", "TASK (read from standard input) is empty"),
        (b"caf\xe9", "TASK (read from standard input) is no UTF-8 text (byte 3)"),
    ],
)
def test_a_task_from_a_bad_stdin(capsys, monkeypatch, stdin, message):
    monkeypatch.setattr(sys, "stdin", None if stdin is None else types.SimpleNamespace(buffer=io.BytesIO(stdin)))
    refuse(capsys, ["-"], message)


def test_a_task_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("\ufeffWhy is grass gr\u00fcn?\n".encode())))
    assert main(["-", "--print-workflow"]) == 0
    assert '"prefix": "Why is grass gr\u00fcn?"' in capsys.readouterr().out


def test_an_unreadable_file(capsys, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    refuse(capsys, ["--workflow", "file.json"], "--workflow 'file.json': cannot be read (Permission denied)")


def test_a_byte_order_mark_is_no_mistake(capsys, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b'\xef\xbb\xbf{"prefix": "x"}')
    assert main(["--workflow", str(path), "--print-workflow"]) == 0 and '"prefix": "x"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "tail, code, message",
    [
        ("hello --print-workflow | head -c 1", 1, ""),
        ("hello --print-workflow >&-", 1, "standard output is closed"),
        ("hello --print-workflow >/dev/full", 1, "minips: error: the output cannot be written (No space left on device)\n"),
        ("- <&-", 1, "standard input is closed"),
        ("hello --model /no/such 2>&-", 1, ""),
        ("hello --system $'\\xf0\\x9f\\x98\\x80' --print-workflow 2>&-", 0, ""),
        ("--help >/dev/null", 0, ""),
        ("$'caf\\xe9' --print-workflow", 1, "minips: error: TASK is not valid text"),
    ],
)
def test_streams_that_are_closed_or_full(tail, code, message):
    command = f"{sys.executable} -m minips.generate {tail}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=60, check=False)
    err = done.stderr.decode()
    assert done.returncode in (code, 0 if "head" in tail else code) and message in err and err.count("\n") == bool(message), err


def test_refusals_and_help_do_not_load_torch():
    code = "import sys; from minips.generate import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert main(['']) == 1 and main(['x', '--print-workflow']) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False)
    assert done.returncode == 0, done.stderr


FLAGS = [
    "--compile",
    "--top-k",
    "5",
    "--seed",
    "9",
    "--worker-tokens",
    "7",
    "--max-tokens",
    "8",
    "--stop",
    "a",
    "--repetition-penalty",
    "1.2",
    "--system",
    "s",
]


@pytest.mark.parametrize(
    "argv", [["task"], ["task", *FLAGS], ["--workflow", "trajectories"], ["--workflow", "samples", *FLAGS], ["x", "--seed", "random"]]
)
def test_a_printed_workflow_amounts_to_itself(capsys, tmp_path, argv):
    assert main([*argv, "--print-workflow"]) == 0
    first = capsys.readouterr().out
    path = tmp_path / "file.json"
    path.write_text(first)
    assert main(["--workflow", str(path), "--print-workflow"]) == 0 and capsys.readouterr().out == first


def test_flags_beside_a_workflow_hold_everywhere(capsys, tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"prefix": "x", "branches": [{"sampling": {"max_tokens": 9, "top_k": 3}}, {"turns": [{"sampling": {"max_tokens": 8}}]}],'
                    ' "synthesizer": {"adapter": "a"}}')  # fmt: skip
    from minips.generate import build_parser, workflow_of
    from minips.workflow import workers_of

    data = workflow_of(build_parser().parse_args(["--workflow", str(path), "--worker-tokens", "4", "--method", "text", "--model", "m"]))
    assert [turn.params.max_tokens for worker in workers_of(data) for turn in worker.turns] == [4, 4]
    assert data["branches"][0]["sampling"] == {"top_k": 3} and data["model"] == "m" and data["synthesizer"]["adapter"] is None
