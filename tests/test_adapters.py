"""`python -m minips.adapters`: the release's average bit for bit, what must agree, exit codes, what `info` says."""

import configparser
import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minips import MinipsError
from minips.adapter import write_lora
from minips.adapters import describe, main, merge_adapters
from minips.shipped import weights_folders
from tests.support import GOLDEN, golden_engine
from tests.test_adapter import COMPONENTS, edit, load, made, prints, same_adapter, save, u_logits_of


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model():
    return golden_engine("tiny-qwen3").model


def test_merge_reproduces_the_release_bit_for_bit(tmp_path, model, capsys):
    out = tmp_path / "merged"
    a, b, expected = (COMPONENTS / f"qwen3-{name}" for name in ("a", "b", "merged-ab"))
    assert main(["merge", str(a), str(b), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    tensors, golden = (load_file(place / "judger_lora" / "adapter_model.safetensors") for place in (out, expected))
    assert tensors.keys() == golden.keys() and all(torch.equal(tensors[name], golden[name]) for name in golden)
    assert (out / "cache_mapper.pt").read_bytes() == (expected / "cache_mapper.pt").read_bytes()
    configs = [json.loads((place / "judger_lora" / "adapter_config.json").read_text()) for place in (out, expected)]
    assert configs[0] == configs[1]
    assert torch.equal(u_logits_of(out), u_logits_of(expected))
    assert describe(out)["training"]["merged"]["weights"] == [0.5, 0.5]


def test_merge_weights_mapper_and_missing(tmp_path, model):
    a, b = COMPONENTS / "qwen3-a", COMPONENTS / "qwen3-b"
    first, second = (load_file(place / "judger_lora" / "adapter_model.safetensors") for place in (a, b))
    third = load(merge_adapters(a, b, tmp_path / "x", weight=0.3, mapper="a"), model)
    for name, pair in third.lora.pairs.items():
        for part, tensor in zip("AB", pair):
            key = f"base_model.model.{name}.lora_{part}.weight"
            assert torch.equal(tensor, 0.3 * first[key] + 0.7 * second[key])
    assert (tmp_path / "x" / "cache_mapper.pt").read_bytes() == (a / "cache_mapper.pt").read_bytes()
    all_of_a = load(merge_adapters(a, b, tmp_path / "y", weight=1, mapper="none"), model)
    all_of_a.info = {}
    assert same_adapter(load(a, model, parts="lora_only"), all_of_a) and not (tmp_path / "y" / "cache_mapper_config.json").exists()
    with pytest.raises(MinipsError, match="cannot be averaged"):
        merge_adapters(a, b, tmp_path / "z", mapper="average")
    lacking = tmp_path / "lacking"
    shutil.copytree(b, lacking)
    key = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    save_file({k: v for k, v in second.items() if not k.startswith(key)}, lacking / "judger_lora" / "adapter_model.safetensors")
    with pytest.raises(MinipsError, match="layers.1.self_attn.k_proj.lora_A.weight is missing"):
        merge_adapters(a, lacking, tmp_path / "z")
    for missing, factor in (("copy", 1.0), ("zero", 0.25)):
        merged = merge_adapters(a, lacking, tmp_path / missing, weight=0.25, missing=missing)
        found = load_file(merged / "judger_lora" / "adapter_model.safetensors")
        assert torch.equal(found[f"{key}B.weight"], factor * first[f"{key}B.weight"]) and len(found) == 24
        load(merged, model)


def test_merge_of_our_form_and_across_forms(tmp_path, model):
    one, two = made(), made()
    two.lora.pairs = {name: (a * 2, b - 1, scale) for name, (a, b, scale) in two.lora.pairs.items()}
    two.mapper.key_a.data += 1
    save(one, tmp_path / "one"), save(two, tmp_path / "two")
    found = load(merge_adapters(tmp_path / "one", tmp_path / "two", tmp_path / "x", weight=0.75), model)
    for name, (a, b, _) in found.lora.pairs.items():
        assert torch.equal(a, 0.75 * one.lora.pairs[name][0] + 0.25 * two.lora.pairs[name][0])
        assert torch.equal(b, 0.75 * one.lora.pairs[name][1] + 0.25 * two.lora.pairs[name][1])
    assert torch.equal(found.mapper.key_a, two.mapper.key_a) and found.options == one.options
    both = load(merge_adapters(tmp_path / "one", tmp_path / "two", tmp_path / "v", weight=0.75, mapper="average"), model)
    torch.testing.assert_close(both.mapper.key_a, one.mapper.key_a + 0.25)
    assert torch.equal(both.mapper.value_b, one.mapper.value_b) and both.mapper.config == one.mapper.config
    assert found.info["training"]["merged"]["training"] == [{"steps": 3, "loss": 1.5}] * 2
    ours, theirs = COMPONENTS / "qwen3-a", COMPONENTS / "qwen3-b"
    save(load(ours, model), tmp_path / "ours")
    across = load(merge_adapters(tmp_path / "ours", theirs, tmp_path / "y"), model)
    back = load(merge_adapters(theirs, tmp_path / "ours", tmp_path / "z", mapper="a"), model)
    expected = load(COMPONENTS / "qwen3-merged-ab", model)
    for found in (across, back):
        assert all(torch.equal(found.mapper.state_dict()[name], t) for name, t in expected.mapper.state_dict().items())
        assert all(torch.equal(found.lora.pairs[name][1], pair[1]) for name, pair in expected.lora.pairs.items())
    assert (tmp_path / "y" / "minips.json").exists() and (tmp_path / "z" / "cache_mapper.pt").exists()
    odd = [({"base_fingerprint": "x"}, "base_fingerprint 'x'"), ({"merge_options": {"layout": "parallel"}}, "merge options")]
    for changes, message in odd:
        shutil.copytree(tmp_path / "two", tmp_path / "odd")
        edit(tmp_path / "odd" / "minips.json", **changes)
        with pytest.raises(MinipsError, match=message):
            merge_adapters(tmp_path / "one", tmp_path / "odd", tmp_path / "w")
        shutil.rmtree(tmp_path / "odd")


def test_adapters_that_do_not_fit_are_not_averaged(tmp_path, capsys):
    a, b = COMPONENTS / "qwen3-a", COMPONENTS / "qwen3-b"
    odd = [("r", 8), ("lora_alpha", 16), ("target_modules", ["q_proj"]), ("use_rslora", True)]
    for number, (name, value) in enumerate(odd):
        shutil.copytree(b, tmp_path / str(number))
        edit(tmp_path / str(number) / "judger_lora" / "adapter_config.json", **{name: value})
        assert main(["merge", str(a), str(tmp_path / str(number)), "--out", str(tmp_path / "x")]) == 1
        assert f"has {name} {value!r}" in capsys.readouterr().err
    for other, message in [
        ("llama-a", "was made for 'tiny-llama', qwen3-a for 'tiny-qwen3'"),  # the tiny ones have one shape
        ("qwen3-resized500", "500 rows of it, qwen3-a with the whole vocabulary"),
    ]:
        assert main(["merge", str(a), str(COMPONENTS / other), "--out", str(tmp_path / "x")]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "x").exists()
    (tmp_path / "bare").mkdir()
    shutil.copy(a / "cache_mapper.pt", tmp_path / "bare")
    for argv, message in [
        (["merge", str(a), str(tmp_path / "bare")], "bare: has no LoRA"),
        (["merge", str(a), str(b), "--weight", "1.5"], "weight is 1.5, expected a number from 0 to 1"),
        (["merge", str(a), str(b), "--weight", "nan"], "weight is nan"),
        (["merge", str(a), "nowhere-at-all"], "adapter 'nowhere-at-all' was not found"),
        (["merge", str(a), str(a / "judger_lora")], None),
        (["merge", str(a / "judger_lora"), str(b)], "has no place for the mapper of qwen3-b; use --mapper none"),
        (["convert", str(a), "--to", "minips", "--model", str(GOLDEN / "models" / "nothing")], "was not found"),
    ]:
        code = main([*argv, "--out", str(tmp_path / "x")])
        error = capsys.readouterr().err
        if message is None:
            assert code == 0 and not (tmp_path / "x" / "cache_mapper.pt").exists()
            shutil.rmtree(tmp_path / "x")
        else:
            assert code == 1 and message in error and error.startswith("minips: error: ") and error.count("\n") == 1
            assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    assert main(["merge", str(a), str(b), "--out", str(tmp_path / "x")]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["merge", "a", "b"], ["info"], ["convert", "a", "--to", "zip", "--out", "x"], ["sing"]])
def test_bad_usage_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2 and "usage:" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(monkeypatch, capsys):
    monkeypatch.setattr("minips.adapters.describe", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["info", "x"]) == 130 and capsys.readouterr().err == "\nminips: interrupted\n"


@pytest.mark.parametrize("name", sorted(path.name for path in COMPONENTS.iterdir()))
def test_info_of_the_golden_components(name, capsys, monkeypatch):
    monkeypatch.setattr("minips.adapters.load_weights", None)  # no base model is needed
    assert main(["info", str(COMPONENTS / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["form"] == "released" and found["base_model"] == ("tiny-llama" if name == "llama-a" else "tiny-qwen3")
    inputs = 1 if name == "qwen3-no-metadata" else 3
    parameters = 32 * inputs + 32 + 4 * 32 + 4
    expected = {"kind": "affine", "key_space": "rotated", "hidden_dim": 32, "metadata_features": "none" if inputs == 1 else "both"}
    assert found["mapper"] == {**expected, "parameters": parameters, "megabytes": 4 * parameters / 1e6}
    lora = found["lora"]
    assert (lora["rank"], lora["alpha"], lora["modules"], lora["parameters"]) == (4, 8, 12, 7680) and lora["megabytes"] == 0.03072
    assert lora["targets"] == ["k_proj", "o_proj", "q_proj", "v_proj"] and not lora["use_rslora"]
    assert found["merge_options"]["profile"] == "official" and found["vocab_rows"] == (500 if "resized" in name else None)
    assert main(["info", str(COMPONENTS / name)]) == 0
    text = capsys.readouterr().out
    assert "form: released" in text and f"{parameters:,} parameters" in text and "targets k_proj o_proj" in text


def test_info_of_our_form_and_of_a_bare_lora(tmp_path):
    adapter = made("linear", per_head=True)
    found = describe(save(adapter, tmp_path / "x"))
    assert found["form"] == "minips" and found["base_fingerprint"] == prints() and found["training"] == {"steps": 3, "loss": 1.5}
    assert found["mapper"] == {
        "kind": "linear", "key_space": "unrotated", "per_head": True,
        "parameters": 2 * 3 * 2 * (32 * 32 + 32), "megabytes": 8 * 3 * 2 * (32 * 32 + 32) / 1e6,
    }  # fmt: skip
    assert found["lora"]["use_rslora"] and found["merge_options"]["keep_turns"] == "compact"
    (tmp_path / "bare").mkdir()
    write_lora(adapter.lora, tmp_path / "bare")
    found = describe(tmp_path / "bare")
    assert (found["form"], found["mapper"], found["merge_options"]) == ("peft", None, None)


def test_the_shipped_adapter_is_installed_with_the_package():
    """`pip install .` puts it beside the environment's packages, where a program that runs in any folder finds it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    packed = settings["options.data_files"]
    for folder in ("smollm2-135m-ps", "recipes"):
        assert packed[f"share/minips/weights/{folder}"] == f"weights/{folder}/*"
        assert list((ROOT / "weights" / folder).iterdir())
    assert Path(sysconfig.get_path("data")) / "share" / "minips" / "weights" in weights_folders()


@pytest.mark.parametrize(
    "begin, message",
    [(b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"), (b"PK\x03\x04" + bytes(90), "is a zip archive")],
)
@pytest.mark.parametrize("name", ["mapper.safetensors", "adapter_model.safetensors"])
def test_files_of_an_adapter_that_are_no_safetensors_are_recognised(tmp_path, name, begin, message):  # FAULTS 6, 83
    folder = tmp_path / "adapter"
    shutil.copytree(ROOT / "weights" / "smollm2-135m-ps", folder)
    (folder / name).write_bytes(begin)
    with pytest.raises(MinipsError, match=f"{name}: {message}"):
        describe(folder)
