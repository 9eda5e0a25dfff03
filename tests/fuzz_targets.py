"""What the fuzzer is let loose on: of each target valid files, and what is done with them. See `fuzz_support`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import warnings
from pathlib import Path

import torch

from minips import Engine, SamplingParams, Synthesizer
from minips.adapter import load_adapter, save_adapter
from minips.branch_files import save_branches
from minips.chat import detect_format
from minips.config import ModelConfig
from minips.generate import build_parser, main
from minips.tokenizer import StreamDecoder, Tokenizer

from .fuzz_support import ODD_VALUES, Target, fuzz
from .support import GOLDEN, U, branches_of, chat_engine, golden_engine, tiny_engine
from .tiny_folder import write_model

FAMILIES = {
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "layer_types": ["full_attention"] * 2},
}  # fmt: skip
SHORT = SamplingParams(max_tokens=2)


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for pattern in patterns for path in sorted(folder.glob(pattern))}


def use_model(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, max_kv_tokens=64)
    engine.decode([engine.prefill([1, 2, 3])], SHORT)
    engine.close()
    assert engine.check()


def config(folder: Path) -> Target:
    for name, changes in FAMILIES.items():
        write_model(folder / name, **changes)
    files = contents(folder, "*/config.json")

    def attempt(place: Path) -> None:
        changed = [name for name in FAMILIES if not _same(place / name / "config.json", files[f"{name}/config.json"])]
        for name in changed or FAMILIES:
            use_model(place / name)

    return Target(files, attempt)


def _same(path: Path, data: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def weights(folder: Path) -> Target:
    write_model(folder / "single")
    write_model(folder / "shards", shards=2)
    files = contents(folder, "single/*.safetensors", "shards/*.safetensors", "shards/*.index.json")

    def attempt(place: Path) -> None:
        changed = {name.split("/")[0] for name, data in files.items() if not _same(place / name, data)}
        for name in sorted(changed) or ("single", "shards"):
            use_model(place / name)

    return Target(files, attempt)


def tokenizer(folder: Path) -> Target:
    write_model(folder)
    settings = folder / "tokenizer_config.json"
    template = "{% for m in messages %}<|im_start|>system\nYou are helpful.<|im_end|>{% endfor %}"
    settings.write_text(
        json.dumps({**json.loads(settings.read_text()), "chat_template": template, "bos_token": {"content": "<|endoftext|>"}})
    )
    model = ModelConfig.from_folder(folder)

    def attempt(place: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = Tokenizer.from_folder(place, model)
        if found is None:
            return
        chat = detect_format(place, found)
        for text in ("Use the user's sys\n\n", "é\U0001f600 \0\u2028", "<|im_end|>hi<think>", ""):
            ids = found.encode(text)
            found.encode_raw(text)
            decoder = StreamDecoder(found, ("zz",))
            "".join(map(decoder.push, ids)) + decoder.flush()
            found.decode(ids)
            if chat is not None:
                chat.full(text)
        found.decode(range(-2, 320))

    return Target(contents(folder, "tokenizer.json", "tokenizer_config.json", "generation_config.json"), attempt)


def adapter(folder: Path) -> Target:
    engine = golden_engine("tiny-qwen3")
    components = GOLDEN / "components" / "qwen3-a"
    files = {f"released/{name}": data for name, data in contents(components, "*.*", "judger_lora/*").items()}
    save_adapter(load_adapter(components, engine.model, str), folder / "ours", engine.config, base_fingerprint=engine.fingerprint)
    files |= contents(folder, "ours/*")
    root = engine.prefill([1, 2, 3, 4])
    branches = engine.encode(engine.fork(root, [[5], [6, 7]]), [[8, 9], [10]])
    (folder / "released").mkdir()

    def attempt(place: Path) -> None:
        changed = {name.split("/")[0] for name, data in files.items() if not _same(place / name, data)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for form in sorted(changed) or ("ours", "released"):
                Synthesizer(engine, place / form).generate_from_caches(branches, [3, 4], SHORT, consume=False)

    return Target(files, attempt)


def branches(folder: Path) -> Target:
    engine = tiny_engine(max_kv_tokens=400)
    save_branches(branches_of(engine), folder / "saved")
    engine.close()
    files = contents(folder, "saved/*")

    def attempt(place: Path) -> None:
        try:
            Synthesizer(engine).generate_from_caches(engine.load_branches(place / "saved"), U, SHORT)
        finally:
            engine.close()
            used = engine.stats()["used_pages"]
            if used or not engine.check():
                raise AssertionError(f"{used} pages are held")

    return Target(files, attempt)


# Command lines, on a tiny model that is there already


def command(argv: list[str]) -> None:
    """Run it: exit code 0, or 1 or 2 with one line; nothing else may come out."""
    out, err = io.StringIO(), io.StringIO()
    out.reconfigure = err.reconfigure = lambda **_: None
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("minips: error: ")]
    if code not in (0, 1, 2) or len(errors) != (code != 0) or "Traceback" in err.getvalue() or code and lines[-1] != errors[0]:
        raise AssertionError(f"exit code {code}: {err.getvalue()[-1500:]!r} of {argv!r}"[:3000])


def on_a_tiny_model() -> None:
    engine = chat_engine(max_kv_tokens=600)
    Engine.from_pretrained = classmethod(lambda *_, **__: engine)


WORKFLOW = {
    "name": "n",
    "model": "m",
    "engine": {"device": "auto", "dtype": "auto", "kv_dtype": "auto", "page_size": None, "max_kv_tokens": 100},
    "method": "parallel",
    "system": "s",
    "prefix": "Plan a garden.",
    "sampling": {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 1,
        "stop": ["zz"],
        "stop_token_ids": [5],
    },
    "branches": [
        {"prompt": "Plants.", "count": 2, "label": "a"},
        {"prompt": [{"role": "user", "content": "Costs."}], "sampling": {"temperature": 0.0, "ignore_eos": True}},
        {"turns": [{"prompt": "x"}, {"prompt": [5, 6], "output": "given"}, {"sampling": {"seed": 5, "max_tokens": 2}}]},
        {"output": [7, 8, 9]},
    ],
    "synthesizer": {
        "prompt": "One plan.",
        "sampling": {"max_tokens": 3, "repetition_penalty": 1.1},
        "adapter": None,
        "merge": {"layout": "parallel", "keep_turns": "outputs", "keep_prefix": True, "branch_scale": 1.5},
    },
}


def workflow(folder: Path) -> Target:
    on_a_tiny_model()
    loads = {"load_branches": "../saved", "synthesizer": {"prompt": "u", "sampling": {"max_tokens": 2}}}
    engine = Engine.from_pretrained()
    with engine.prefill("x") as root:
        engine.save_branches(engine.encode(engine.fork(root, ["y"]), ["z"]), folder / "saved")
    files = {"full.json": WORKFLOW, "result.json": {"answer": "x", "workflow": {**WORKFLOW, "method": "best-of-n"}}, "loads.json": loads}
    files["result.json"]["workflow"]["branches"] = WORKFLOW["branches"][:2]
    files = {name: json.dumps(data).encode() for name, data in files.items()}

    def attempt(place: Path) -> None:
        os.chdir(place)
        changed = [name for name, data in files.items() if not _same(place / name, data)]
        for name in changed or ("full.json", "result.json"):
            for more in (["--print-workflow"], ["--quiet", "--json"]):
                command(["--workflow", name, *more])

    return Target(files, attempt, pipes=False)


def arguments(folder: Path) -> Target:
    """The arguments are the file: one JSON list of strings."""
    on_a_tiny_model()
    flags = [
        option for action in build_parser()._actions for option in action.option_strings if option not in ("-h", "--help", "--interactive")
    ]
    base = ["Why?", "--workers", "2", "--worker-tokens", "3", "--max-tokens", "3"]
    values = [value if isinstance(value, str) else str(value) for value in ODD_VALUES]
    values += [
        "auto",
        "cpu",
        "samples",
        "text",
        "random",
        "layout=sequential",
        "anchor=zero",
        "keep_prefix=false",
        "=",
        "x=[",
        "branch_scale=1e999",
    ]

    def attempt(place: Path) -> None:
        rng = random.Random((place / "arguments").read_bytes())  # the mutated bytes choose
        argv = list(base)
        for _ in range(rng.randint(1, 4)):
            option = rng.choice(flags)
            argv += [option] if rng.random() < 0.15 else [option, rng.choice(values)] if rng.random() < 0.9 else [rng.choice(values)]
        if rng.random() < 0.3:
            del argv[rng.randrange(len(argv))]
        if rng.random() < 0.2:
            rng.shuffle(argv)
        os.chdir(place)
        command([*argv, "--quiet"])

    return Target({"arguments": b"x" * 64}, attempt, pipes=False)


TARGETS = {
    "config": config,
    "weights": weights,
    "tokenizer": tokenizer,
    "adapter": adapter,
    "branches": branches,
    "workflow": workflow,
    "arguments": arguments,
}


if __name__ == "__main__":
    names, seconds = sys.argv[1].split(","), float(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    torch.set_num_threads(1)
    failed = False
    for name in names:
        cases, findings = fuzz(name, TARGETS[name], seconds, first)
        failed = failed or bool(findings) or not cases
        for finding in findings:
            print(json.dumps(finding))
        print(json.dumps({"target": name, "cases": cases}), flush=True)
    sys.exit(failed)
