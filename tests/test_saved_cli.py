"""--save-branches and --load-branches: workers in one process, the synthesizer in another, the same tokens. FAULTS items 84, 86."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from minips import Engine, SamplingParams, Synthesizer
from minips.generate import main

from .support import chat_engine
from .tiny_folder import CONFIG, write_model

TASK = "Name a fruit."
SHORT = ["--workers", "3", "--worker-tokens", "9", "--max-tokens", "8", "--max-kv-tokens", "900"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("saved") / "tiny", max_position_embeddings=2048))


@pytest.fixture
def tiny(monkeypatch):
    engine = chat_engine()
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setattr("minips.shipped.weights_folders", lambda: [])  # the shipped adapter is for the real model
    return engine


def in_a_process(*argv, code=0):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def run(capsys, *argv):
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == "" and message in err and err.startswith("minips: error: ") and err.count("\n") == 1, err


def test_workers_in_one_process_and_the_synthesizer_in_another(tmp_path, model, capsys):
    folder = tmp_path / "new" / "saved"
    argv = ["-m", "minips.generate", "--model", model, "--json"]
    out, err = in_a_process(*argv, TASK, *SHORT, "--save-branches", str(folder))
    live = json.loads(out)
    assert f"saved 3 branches in {folder}" in err and live["branch_tokens"] and all(live["branch_tokens"])
    out, err = in_a_process(*argv, TASK, "--max-tokens", "8", "--max-kv-tokens", "900", "--load-branches", str(folder))
    loaded = json.loads(out)
    assert loaded["token_ids"] == live["token_ids"] and loaded["answer"] == live["answer"]
    assert loaded["branch_tokens"] == live["branch_tokens"] and loaded["reused_tokens"] == live["reused_tokens"]
    assert loaded["counters"]["prefilled_tokens"] == loaded["prefilled_tokens"] == live["prefilled_tokens"], "only the prompt"
    assert [w["token_ids"] for w in loaded["workers"]] == [w["token_ids"] for w in live["workers"]]
    assert set(loaded) == set(live) and "read 3 branches" in err
    result = tmp_path / "result.json"
    result.write_text(out)
    again = json.loads(run(capsys, "--workflow", str(result), "--json", "--quiet")[1])
    assert again["token_ids"] == live["token_ids"] and again["workflow"] == loaded["workflow"]


def test_file_sizes_follow_the_formula(tmp_path, model, capsys):  # FAULTS 86
    code, out, _ = run(capsys, TASK, "--model", model, *SHORT, "--quiet", "--json", "--save-branches", str(tmp_path / "saved"))
    assert code == 0
    prefix = json.loads((tmp_path / "saved" / "branches.json").read_text())["prefix_ids"]
    tokens = {"prefix.safetensors": len(prefix)}
    for index, worker in enumerate(json.loads(out)["workers"]):
        stop = worker["finish_reason"] == "stop"  # the token that stopped it is cached too
        tokens[f"branch-{index:03d}.safetensors"] = worker["prompt_tokens"] + worker["tokens"] + stop - len(prefix)
    for name, count in tokens.items():
        path = tmp_path / "saved" / name
        header = int.from_bytes(path.read_bytes()[:8], "little")
        size = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * count * 4
        assert path.stat().st_size == 8 + header + size, name
    files = list((tmp_path / "saved").iterdir())
    assert len(files) == 5 and all(path.stat().st_mode & 0o777 == 0o644 for path in files), "three branches, the prefix and branches.json"


SCRIPT = """
import hashlib, sys
from minips import Engine, SamplingParams, Synthesizer
engine = Engine.from_pretrained(sys.argv[1], page_size=16, max_kv_tokens=900)
out = Synthesizer(engine).generate_from_caches(
    engine.load_branches(sys.argv[2]), "Which one?", SamplingParams(max_tokens=8, return_logits=True)
)
print(out.token_ids, hashlib.sha256(out.logits.numpy().tobytes()).hexdigest())
"""


def test_logits_of_another_process_are_the_same_to_the_bit(tmp_path, model):  # FAULTS 84
    engine = Engine.from_pretrained(model, page_size=16, max_kv_tokens=900)
    with engine.prefill(TASK) as root:
        branches = engine.decode(engine.fork(root, ["A red one.", "A long one."]), SamplingParams(max_tokens=9, temperature=1.0, seed=3))
    engine.save_branches(branches, tmp_path / "saved")
    out = Synthesizer(engine).generate_from_caches(branches, "Which one?", SamplingParams(max_tokens=8, return_logits=True))
    found, _ = in_a_process("-c", SCRIPT, model, str(tmp_path / "saved"))
    assert found == f"{out.token_ids} {hashlib.sha256(out.logits.numpy().tobytes()).hexdigest()}\n"


@pytest.mark.parametrize("method", ["reuse", "naive"])
def test_other_methods_and_prompts_on_the_same_branches(tmp_path, tiny, capsys, method):
    argv = ["x", "--workers", "2", "--worker-tokens", "5", "--max-tokens", "4", "--quiet", "--json"]
    first = json.loads(run(capsys, *argv, "--method", method, "--save-branches", str(tmp_path / "saved"))[1])
    load = ["--load-branches", str(tmp_path / "saved"), "--max-tokens", "4", "--quiet", "--json"]
    again = json.loads(run(capsys, "x", *load, "--method", method)[1])
    assert again["token_ids"] == first["token_ids"] and again["method"] == method and again["merge"] == first["merge"]
    asked = json.loads(run(capsys, *load, "--prompt", "As it is.", "--repetition-penalty", "1.5", "--seed", "3")[1])
    workflow = asked["workflow"]
    assert workflow["synthesizer"]["prompt"] == "As it is." and set(workflow) == {
        "model",
        "engine",
        "method",
        "load_branches",
        "synthesizer",
    }
    assert asked["method"] == "parallel" and asked["seeds"] == {"workers": [[None], [None]], "answer": 3}
    assert tiny.stats()["used_pages"] == 0 and tiny.check()


def test_several_turns_are_kept_as_they_were(tmp_path, tiny, capsys):
    turns = [{"prompt": "a", "sampling": {"max_tokens": 4}}, {"prompt": "b", "output": "given"}, {"sampling": {"max_tokens": 3}}]
    workflow = tmp_path / "file.json"
    workflow.write_text(json.dumps({"prefix": "x", "branches": [{"turns": turns}, {"sampling": {"max_tokens": 6}}]}))
    for keep in ("outputs", "all"):
        more = ["--merge", f"keep_turns={keep}", "--max-tokens", "4", "--json", "--prompt", "u"]
        folder = str(tmp_path / keep)
        code, first, err = run(capsys, "--workflow", str(workflow), "--save-branches", folder, *more)
        assert code == 0, err
        code, again, other = run(capsys, "--load-branches", folder, *more)
        assert code == 0 and json.loads(again)["token_ids"] == json.loads(first)["token_ids"]
        assert json.loads(again)["branch_tokens"] == json.loads(first)["branch_tokens"]
        reading = [line for line in err.splitlines() if line.startswith("synthesizer: reading")]
        assert reading and reading[0] in other, "the line that says what is read"


@pytest.mark.parametrize("method", ["text", "summary", "best-of-n"])
def test_methods_that_read_words_save_too_but_cannot_load(tmp_path, tiny, capsys, method):
    argv = ["x", "--workers", "2", "--worker-tokens", "5", "--max-tokens", "4", "--method", method]
    assert run(capsys, *argv, "--quiet", "--save-branches", str(tmp_path / "saved"))[0] == 0
    refused(capsys, ["x", "--load-branches", str(tmp_path / "saved"), "--method", method], "expected parallel, reuse or naive, because")


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--load-branches", "d"],
            "--load-branches needs a TASK, which is restated, or --prompt, which is put as it is; neither was given",
        ),
        (["x", "--load-branches", "d", "--prompt", "y"], "both was given"),
        (["x", "--load-branches", ""], "--load-branches is empty"),
        (["", "--load-branches", "d"], "TASK is empty"),
        (["x", "--save-branches", " "], "--save-branches is empty"),
        (["x", "--load-branches", "d", "--save-branches", "e"], "--load-branches and --save-branches cannot be combined: no workers run"),
        (["x", "--load-branches", "d", "--workers", "2"], "--load-branches and --workers cannot be combined"),
        (["x", "--load-branches", "d", "--worker-prompt", "2"], "--load-branches and --worker-prompt cannot be combined"),
        (["x", "--load-branches", "d", "--temperature", "0"], "--load-branches and --temperature cannot be combined"),
        (["x", "--load-branches", "d", "--top-k", "0"], "--load-branches and --top-k cannot be combined"),
        (["x", "--load-branches", "d", "--system", "s"], "--load-branches and --system cannot be combined"),
        (["--load-branches", "d", "--workflow", "samples"], "--load-branches and --workflow cannot be combined"),
        (["--load-branches", "d", "--interactive"], "--load-branches and --interactive cannot be combined"),
        (["--save-branches", "d", "--interactive"], "--interactive and --save-branches cannot be combined"),
        (["x", "--save-branches", "d", "--print-workflow"], "--print-workflow and --save-branches cannot be combined: nothing is run"),
        (["x", "--save-branches", "{folder}"], "': exists already, expected a new folder"),
        (["x", "--save-branches", "{folder}/link"], "exists already, expected a new folder"),
        (["x", "--save-branches", "{folder}/file/below"], "is no folder that can be written to"),
        (["x", "--save-branches", "{folder}/link/below"], "link' is no folder that can be written to"),
        (["x", "--save-branches", "n" * 5000], "File name too long"),
        (["x", "--save-branches", "a\0b"], "cannot be made"),
        (["x", "--load-branches", "{folder}/none"], "none/branches.json: no such file"),
        (["x", "--load-branches", "a\0b"], "is no file"),
        (["x", "--load-branches", "{folder}/file"], "branches.json: cannot be read (Not a directory)"),
        (["--workflow", "{folder}/both.json"], "load_branches and prefix cannot be combined: saved branches are read, no workers run"),
        (["--workflow", "{folder}/loads.json", "--save-branches", "{folder}/e"], "--save-branches: the workflow loads branches"),
        (["--workflow", "{folder}/loads.json", "--temperature", "1"], "load_branches and sampling cannot be combined"),
        (["--workflow", "{folder}/bare.json"], "synthesizer.prompt is missing"),
        (["--workflow", "{folder}/odd.json"], "load_branches is 3, expected a string"),
    ],
)
def test_combinations_that_make_no_sense(tmp_path, tiny, capsys, argv, message):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    ask = {"prompt": "u"}
    for name, data in {
        "both": {"load_branches": "d", "prefix": "x"},
        "loads": {"load_branches": "d", "synthesizer": ask},
        "bare": {"load_branches": "d"},
        "odd": {"load_branches": 3, "synthesizer": ask},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    before = sorted(tmp_path.iterdir())
    refused(capsys, [*(part.format(folder=tmp_path) for part in argv), *([] if "--print-workflow" in argv else ["--quiet"])], message)
    assert sorted(tmp_path.iterdir()) == before and tiny.stats()["decoded_tokens"] == 0


def test_other_weights_are_refused(tmp_path, model, capsys):
    saved = str(tmp_path / "saved")
    assert run(capsys, TASK, "--model", model, *SHORT, "--quiet", "--save-branches", saved)[0] == 0
    other = write_model(tmp_path / "other", rms_norm_eps=1e-3)
    refused(
        capsys, [TASK, "--model", str(other), "--quiet", "--load-branches", saved], "caches are only valid for the weights that made them"
    )
    other = write_model(tmp_path / "wider", num_key_value_heads=4)
    refused(capsys, [TASK, "--model", str(other), "--quiet", "--load-branches", saved], "kv_heads is 2, expected 4, as the model has")


def test_a_full_disk_leaves_nothing_half_done(tmp_path, tiny, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minips.branch_files.save_file", full)
    refused(
        capsys,
        ["x", "--workers", "2", "--worker-tokens", "3", "--quiet", "--save-branches", str(tmp_path / "d")],
        "No space left on device",
    )
    assert not list(tmp_path.iterdir()) and tiny.stats()["used_pages"] == 0 and tiny.check()
