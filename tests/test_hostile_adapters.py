"""Adapters that somebody else made: whatever stands in them, one clear line and no other exception. FAULTS items 74, 80, 83."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from minips import MinipsError, Synthesizer
from minips.adapter import load_adapter, save_adapter
from minips.adapters import main
from tests.support import GOLDEN, golden_engine
from tests.test_golden import decode_workers, load

COMPONENTS = GOLDEN / "components"


@pytest.fixture
def engine():
    return golden_engine("tiny-qwen3")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(COMPONENTS / "qwen3-a", tmp_path / "x")
    return tmp_path / "x"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder, engine, message=None):
    with pytest.raises(MinipsError, match=message) as caught:
        Synthesizer(engine, folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": [1]},
        {"target_modules": [[1]]},
        {"target_modules": [{}]},
        {"target_modules": ["a\nb"]},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e308},
        {"r": [1]},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"rank_pattern": {"(?i)q_proj": 8}},
        {"rank_pattern": {"a{99999999999}": 8}},
        {"rank_pattern": {"(([a-z_.0-9]+)+)+X": 4, "(.*a*)*b.*(x+x+)+y": 4}},
        {"base_model_name_or_path": "\ud800", "peft_type": "\ud800"},
        {"bias": "\n" * 5000},
    ],
    ids=str,
)
def test_odd_settings(folder, engine, changes, capsys):
    edit(folder / "judger_lora" / "adapter_config.json", **changes)
    started = time.perf_counter()
    refused(folder, engine)
    for argv in (["info", str(folder)], ["merge", str(folder), str(COMPONENTS / "qwen3-a"), "--out", str(folder / "out")]):
        assert main(argv) in (0, 1) and "Traceback" not in capsys.readouterr().err
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("change", ["huge", "fp8", "scalar", "newline", "no A", "rank 0"])
def test_odd_lora_tensors(folder, engine, change, capsys):
    path = folder / "judger_lora" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(k for k in tensors if k.endswith("lora_A.weight"))
    if change == "huge":
        tensors[key] = tensors[key].double() * 1e300
    elif change == "fp8":
        tensors[key] = (tensors[key] * float("nan")).to(torch.float8_e4m3fn)
    elif change == "scalar":
        tensors["base_model.model.model.embed_tokens.weight"] = torch.tensor(1.0)
    elif change == "newline":
        tensors["a\nb" * 2000] = torch.zeros(1)
    elif change == "no A":
        tensors = {k: v for k, v in tensors.items() if not k.endswith("lora_A.weight")}
    else:
        tensors = {k: v[:0] if k.endswith("lora_A.weight") else v[:, :0].contiguous() for k, v in tensors.items()}
    save_file(tensors, path)
    refused(folder, engine, "adapter_model.safetensors")
    assert main(["info", str(folder)]) in (0, 1)
    assert main(["merge", str(folder), str(COMPONENTS / "qwen3-a"), "--out", str(folder / "out")]) == 1
    assert not (folder / "out").exists() and capsys.readouterr().err.count("\n") <= 2


def test_mappers_that_compute_no_numbers(folder, engine, capsys):
    path = folder / "cache_mapper.pt"
    good = torch.load(path, weights_only=True)
    for bad in ({**good, "net.2.bias": good["net.2.bias"].double() + 1e300}, {"net.0.weight": torch.zeros(1)}):
        torch.save(bad, path)
        refused(folder, engine, "cache_mapper.pt")
        assert main(["merge", str(COMPONENTS / "qwen3-a"), str(folder), "--out", str(folder / "out")]) == 1
    torch.save({name: tensor * 1e37 for name, tensor in good.items()}, path)
    case, _, _ = load("qwen3_m2_unequal")
    branches = decode_workers(engine, case)
    with pytest.raises(MinipsError, match="its coefficients are not finite"):
        Synthesizer(engine, folder).merge(branches)
    assert not any(branch.closed for branch in branches) and engine.check()
    assert load_adapter(folder, engine.model, str, parts="lora_only").mapper is None
    path.write_bytes(b"garbage")
    assert load_adapter(folder, engine.model, str, parts="lora_only").lora is not None  # what is not asked for is not read


def test_parts_of_our_form_are_never_ignored(tmp_path, folder, engine):
    adapter = load_adapter(folder, engine.model, str)
    ours = save_adapter(adapter, tmp_path / "ours", engine.config, base_fingerprint="f")
    load_adapter(ours, engine.model, lambda: "f")
    for spoil, message in [
        (lambda place: (place / "adapter_config.json").unlink(), "adapter_config.json is missing, so it would be ignored"),
        (lambda place: edit(place / "minips.json", mapper=None), "a mapper in minips.json is missing, so it would be ignored"),
        (lambda place: edit(place / "minips.json", base_fingerprint=None), "made on weights None"),
    ]:
        shutil.copytree(ours, tmp_path / "spoilt")
        spoil(tmp_path / "spoilt")
        with pytest.raises(MinipsError, match=message):
            load_adapter(tmp_path / "spoilt", engine.model, lambda: "f")
        shutil.rmtree(tmp_path / "spoilt")


def test_another_base_is_not_vouched_for(tmp_path, capsys):  # FAULTS 74, 80
    argv = ["convert", str(COMPONENTS / "llama-a"), "--to", "minips", "--model", str(GOLDEN / "models" / "tiny-qwen3")]
    assert main([*argv, "--out", str(tmp_path / "y")]) == 1
    assert "was made for 'tiny-llama', the model is 'tiny-qwen3'" in capsys.readouterr().err
    assert main([*argv, "--out", str(tmp_path / "y"), "--force"]) == 0


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 5000])
def test_odd_names(name, engine):
    refused(name, engine)
    assert engine.check()
