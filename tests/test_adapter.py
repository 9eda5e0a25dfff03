"""Adapter folders of both forms: written whole, read strictly, converted and averaged without loss. FAULTS items 80, 83, 94."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minips import MinipsError, Synthesizer
from minips.adapter import Adapter, find_components, load_adapter, new_mapper, save_adapter, save_released_form, write_folder
from minips.adapters import describe, main
from minips.config import MergeOptions, ModelConfig
from minips.lora import LoraAdapter
from minips.mapper import MapperConfig
from minips.weights import fingerprint
from tests.support import GOLDEN, LOGITS, U, branches_of, golden_engine, prompt_ids, relative_error, tiny_config, tiny_engine

COMPONENTS = GOLDEN / "components"
BASE = GOLDEN / "models" / "tiny-qwen3"
KINDS = [("none", {}), ("affine", {"hidden_dim": 8, "metadata_features": "length"}), ("linear", {"per_head": True})]
KINDS += [("low_rank", {"rank": 5}), ("normalize", {})]


@pytest.fixture(scope="module")
def model():
    return golden_engine("tiny-qwen3").model


def prints():
    return fingerprint(BASE, ModelConfig.from_folder(BASE))


def load(folder, model, **settings):
    return load_adapter(folder, model, prints, **settings)


def made(kind="low_rank", *, rank=4, targets=("q_proj", "v_proj"), **fields):
    """A random adapter of ours for tiny-qwen3."""
    torch.manual_seed(3)
    config = ModelConfig.from_folder(BASE)
    mapper = new_mapper(MapperConfig(kind, **fields), config)
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shapes = {"q_proj": (64, 128), "v_proj": (64, 64)}
    pairs = {}
    for layer in range(3):
        for name in targets:
            inner, outer = shapes[name]
            pairs[f"model.layers.{layer}.self_attn.{name}"] = (torch.randn(rank, inner), torch.randn(outer, rank), 8 / rank**0.5)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "use_rslora": True, "bias": "none"}
    settings |= {"target_modules": list(targets), "base_model_name_or_path": "tiny-qwen3", "lora_dropout": 0.0, "inference_mode": True}
    options = MergeOptions(keep_turns="compact", layout="sequential")
    return Adapter("made", mapper, LoraAdapter("made", pairs, settings), options, {"training": {"steps": 3, "loss": 1.5}})


def save(adapter, folder):
    return save_adapter(adapter, folder, ModelConfig.from_folder(BASE), base_fingerprint=prints(), base_model="tiny-qwen3")


def same_adapter(one, other):
    assert (one.mapper is None) == (other.mapper is None) and (one.lora is None) == (other.lora is None)
    if one.mapper is not None:
        first, second = one.mapper.state_dict(), other.mapper.state_dict()
        assert one.mapper.config == other.mapper.config and first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    if one.lora is not None:
        assert one.lora.pairs.keys() == other.lora.pairs.keys() and one.lora.config == other.lora.config
        assert one.lora.base_rows == other.lora.base_rows
        for name, (a, b, scale) in one.lora.pairs.items():
            assert all(torch.equal(*pair) for pair in zip((a, b), other.lora.pairs[name])) and scale == other.lora.pairs[name][2]
    assert one.options == other.options and one.info.get("training") == other.info.get("training")
    return True


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Our form


@pytest.mark.parametrize("kind, fields", KINDS)
@pytest.mark.parametrize("space", ["unrotated", "rotated"])
def test_faults_94_our_form_comes_back_as_it_was(tmp_path, model, kind, fields, space):
    if (kind, space) == ("normalize", "rotated"):
        return
    adapter = made(kind, key_space=space, **fields)
    found = load(save(adapter, tmp_path / "x"), model)
    assert same_adapter(adapter, found) and not any(p.requires_grad for p in found.mapper.parameters())
    assert found.info["base_fingerprint"] == prints() and found.info["base_model"] == "tiny-qwen3"


def test_faults_94_only_lora_tensors_are_written_and_peft_reads_them(tmp_path, model):
    adapter = made()
    folder = save(adapter, tmp_path / "x")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 12 and all(".lora_" in name for name in tensors)
    size = sum(4 * 4 * (64 + outer) for outer in (128, 64)) * 3
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == size
    wanted = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "base_model_name_or_path"}
    assert wanted <= set(json.loads((folder / "adapter_config.json").read_text()))
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ids = prompt_ids(30, 1, 512)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(oracle, folder).eval()(torch.tensor([ids])).logits[0]
    before, after = (
        Synthesizer(golden_engine("tiny-qwen3"), source).generate(text=ids, params=LOGITS, adapted=True).logits
        for source in (adapter, load(folder, model))
    )
    assert torch.equal(before, after) and relative_error(after[: len(ids)], expected) < 1e-4


def test_faults_80_other_weights_of_the_same_shape_are_refused_unless_forced(tmp_path, model):
    folder = save(made(), tmp_path / "x")
    edit(folder / "minips.json", base_fingerprint="0badc0de", base_model="another")
    with pytest.raises(MinipsError, match=rf"made on weights '0badc0de' \('another'\), these are {prints()}"):
        load(folder, model)
    assert same_adapter(made(), load(folder, model, force=True))


def test_faults_80_another_shape_is_refused_naming_both(tmp_path, model):
    folder = save(made(), tmp_path / "x")
    for engine in (golden_engine("tiny-llama"), tiny_engine(tiny_config(num_key_value_heads=6))):
        with pytest.raises(MinipsError, match="made for a model of shape .*'rope'.*, this one is .*'num_key_value_heads'"):
            load_adapter(folder, engine.model, lambda: prints(), force=True)
    shape = json.loads((folder / "minips.json").read_text())["model_shape"]
    assert shape["head_dim"] == 32 and shape["rope"]["theta"] == 1e6
    tensors = load_file(folder / "mapper.safetensors")
    for name, tensor, message in [
        ("key_a", torch.zeros(3, 1, 32, 4), r"key_a is \[3, 1, 32, 4\], expected \[3, 1, 32, 16\]"),
        ("key_a", tensors["key_a"].clone().fill_(float("nan")), "not finite"),
        ("key_a", tensors["key_a"].int(), "not finite"),
        ("key_c", torch.zeros(1), r"unknown: \['key_c'"),
        ("key_a", None, r"missing: \['key_a'"),
    ]:
        changed = {**tensors, name: tensor}
        save_file({key: value for key, value in changed.items() if value is not None}, folder / "mapper.safetensors")
        with pytest.raises(MinipsError, match=f"mapper.safetensors: .*{message}"):
            load(folder, model)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 2}, "format is 2, expected 1"),
        ({"mapper": [1]}, r"mapper is \[1\], expected an object"),
        ({"mapper": {"kind": "low_rank", "depth": 2}}, r"mapper: unknown field 'depth'"),
        ({"mapper": {"kind": "magic"}}, "kind is 'magic'"),
        ({"mapper": {"kind": "affine", "metadata_features": ["x"]}}, "metadata_features is"),
        ({"merge_options": 3}, "merge_options is 3"),
        ({"merge_options": {"anchor": "zero"}}, "anchor 'zero' cannot be combined"),
        ({"merge_options": {"colour": 1}}, "unknown option 'colour'"),
        ({"vocab_rows": "500"}, "vocab_rows is '500'"),
        ({"training": []}, None),
        ({"training": "yes"}, "training is 'yes'"),
    ],
)
def test_faults_in_minips_json_name_the_file(tmp_path, model, changes, message):
    folder = save(made(), tmp_path / "x")
    edit(folder / "minips.json", **changes)
    if message is None:
        assert load(folder, model).info["training"] == []
        return
    with pytest.raises(MinipsError, match=message) as error:
        load(folder, model)
    assert str(error.value).startswith(str(folder / "minips.json")) and "\n" not in str(error.value)


def test_missing_and_garbage_files(tmp_path, model):
    for name in ("mapper.safetensors", "adapter_model.safetensors", "minips.json"):
        for content in (None, b"", b"\x80\x04garbage", os.urandom(300)):
            folder = save(made(), tmp_path / "x")
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
            if (name, content) == ("minips.json", None):
                assert load(folder, model).mapper is None  # a PEFT folder, then
            else:
                with pytest.raises(MinipsError, match=name):
                    load(folder, model)
            shutil.rmtree(folder)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(MinipsError, match="no adapter found; expected minips.json, adapter_config.json, cache_mapper.pt or judger"):
            load(folder, model)


def test_parts_choose_what_is_used(tmp_path, model):
    for folder in (save(made(), tmp_path / "x"), COMPONENTS / "qwen3-a"):
        for parts, expected in (("both", (1, 1)), ("mapper_only", (1, 0)), ("lora_only", (0, 1)), ("none", (0, 0))):
            found = load(folder, model, parts=parts)
            assert ((found.mapper is not None), (found.lora is not None)) == expected
    with pytest.raises(MinipsError, match="adapter parts is 'all', expected one of both"):
        load(folder, model, parts="all")


def test_a_failure_in_the_middle_leaves_no_folder(tmp_path, model, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minips.adapter.write_lora", broken)
    for write in (lambda: save(made(), tmp_path / "x"), lambda: save_released_form(load(COMPONENTS / "qwen3-a", model), tmp_path / "x")):
        with pytest.raises(MinipsError, match="x: cannot be written .*No space left on device"):
            write()
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "x", lambda place: (_ for _ in ()).throw(KeyboardInterrupt))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    with pytest.raises(MinipsError, match="exists already, expected a new folder"):
        write_folder(tmp_path / "x", lambda place: None)
    (tmp_path / "file").write_text("")
    for name in ("a\0b", "n" * 300, "file/y"):
        with pytest.raises(MinipsError, match="cannot be written"):
            write_folder(tmp_path / name, lambda place: None)


# The release's form


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["MINIPS_TEST_MARK"],)


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle", "nested"])
def test_faults_83_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path, model, monkeypatch, how):
    mark = tmp_path / "it ran"
    monkeypatch.setenv("MINIPS_TEST_MARK", str(mark))
    folder = tmp_path / "x"
    folder.mkdir()
    path = folder / "cache_mapper.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Payload()))
    else:
        content = {"net.0.weight": torch.zeros(2), "extra": [Payload()]} if how == "nested" else Payload()
        torch.save(content, path, _use_new_zipfile_serialization=how != "legacy")
    for action in (lambda: load(folder, model), lambda: describe(folder)):
        with pytest.raises(MinipsError, match="cache_mapper.pt: holds something else than tensors"):
            action()
    assert not mark.exists()
    pickle.loads(path.read_bytes()) if how == "pickle" else torch.load(path, weights_only=False)  # the payload is a real one
    assert mark.exists()


def test_broken_cache_mappers_give_one_line(tmp_path, model):
    good = torch.load(COMPONENTS / "qwen3-a" / "cache_mapper.pt", weights_only=True)
    folder = tmp_path / "x"
    folder.mkdir()
    path = folder / "cache_mapper.pt"
    whole = (COMPONENTS / "qwen3-a" / "cache_mapper.pt").read_bytes()
    generator = torch.Generator().manual_seed(0)
    blobs = [b"", b"\x80", b"\x80\x02.", b"PK\x03\x04", whole[:1000], whole[:-30], b"garbage" * 50]
    blobs += [pickle.dumps({"a": 1}), pickle.dumps([])]
    blobs += [bytes(torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8).tolist()) for n in range(1, 60)]
    blobs += [b"\x80\x02" + bytes(torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8).tolist()) for n in range(1, 60)]
    for blob in blobs:
        path.write_bytes(blob)
        with pytest.raises(MinipsError, match="cache_mapper.pt: ") as error:
            load(folder, model)
        assert "\n" not in str(error.value)
    for content, message in [
        ([1], "expected a dictionary of the tensors net.0.weight"),
        ({**good, "step": 3}, "expected a dictionary of the tensors"),
        ({**good, "net.0.weight": good["net.0.weight"].to("meta")}, "cache_mapper.pt: "),
        ({**good, "net.0.weight": good["net.0.weight"].to_sparse()}, "cache_mapper.pt: "),
        ({**good, "net.4.bias": torch.zeros(4)}, r"unknown: \['net.4.bias'"),
        ({**good, "net.0.weight": torch.zeros(32, 2)}, r"net.0.weight is \[32, 2\], expected \[32, 3\]"),
        ({**good, "net.0.bias": torch.full((32,), float("inf"))}, "not finite"),
    ]:
        torch.save(content, path)
        with pytest.raises(MinipsError, match=message):
            load(folder, model)


def test_the_mapper_config_may_be_absent(tmp_path, model):
    for name, features in (("qwen3-merged-ab", "both"), ("qwen3-no-metadata", "none")):
        config = load(COMPONENTS / name, model).mapper.config
        assert (config.hidden_dim, config.metadata_features, config.key_space) == (32, features, "rotated")
    folder = tmp_path / "x"
    shutil.copytree(COMPONENTS / "qwen3-no-metadata", folder)
    (folder / "cache_mapper_config.json").unlink()
    with pytest.raises(MinipsError, match=r"net.0.weight is \[32, 1\], expected \[32, 3\]"):
        load(folder, model)
    (folder / "cache_mapper_config.json").write_text('{"metadata_features": "none"}')
    assert load(folder, model).mapper.config.hidden_dim == 32
    (folder / "cache_mapper_config.json").write_text('{"hidden_dim": "32"}')
    with pytest.raises(MinipsError, match="cache_mapper_config.json: mapper: hidden_dim is '32'"):
        load(folder, model)


def test_checkpoints_inside_a_run_are_found(tmp_path, model):
    expected = load(COMPONENTS / "qwen3-a", model)
    for inner in ("latest", "step_checkpoints/latest"):
        folder = tmp_path / inner.replace("/", "_")
        folder.mkdir()
        (folder / "run_args.json").write_text("{}")
        shutil.copytree(COMPONENTS / "qwen3-a", folder / inner)
        assert find_components(folder) == folder / inner and same_adapter(expected, load(folder, model))
    for name in ("cache_mapper.pt", "judger_lora"):  # one of the two parts
        folder = tmp_path / name
        shutil.copytree(COMPONENTS / "qwen3-a", folder)
        (folder / name).unlink() if name.endswith("pt") else shutil.rmtree(folder / name)
        found = load(folder, model)
        assert (found.mapper is None) == (name == "cache_mapper.pt") and (found.lora is None) == (name == "judger_lora")
        assert found.options == MergeOptions(profile="official") and found.released_form


def release_like(folder, **changes):
    """A folder with all that the published one may hold, for tiny-qwen3 with its vocabulary cut to 500."""
    shutil.copytree(COMPONENTS / "qwen3-resized500", folder)
    torch.save({"optimizer": {"state": {0: torch.zeros(3)}}, "step": 95060}, folder / "training_state.pt")
    (folder / "checkpoint_meta.json").write_text(json.dumps({"global_step": 95060, "epoch": 1, "metrics": {"loss": 0.5}}))
    (folder / "run_args.json").write_text("{}")
    (folder / "train.log").write_text("step 1\n")
    (folder / "train_mixed_summary.json").write_text("[]")
    (folder / "judger_lora" / "README.md").write_text("card")
    return folder


def test_a_release_like_folder_goes_through_everything_without_loss(tmp_path, model, capsys):
    source = release_like(tmp_path / "source")
    first = load(source, model)
    assert first.lora.base_rows == 500 and len(first.lora.pairs) == 12 and first.info["training"]["global_step"] == 95060
    found = describe(source)
    assert found["form"] == "released" and found["vocab_rows"] == 500 and found["lora"]["parameters"] == 7680
    assert found["base_tensors"] == {f"base_model.model.{name}.weight": [500, 64] for name in ("lm_head", "model.embed_tokens")}
    assert main(["convert", str(source), "--to", "minips", "--out", str(tmp_path / "ours"), "--model", str(BASE)]) == 0
    assert main(["convert", str(tmp_path / "ours"), "--to", "released", "--out", str(tmp_path / "back"), "--model", str(BASE)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'ours'}\n{tmp_path / 'back'}\n"
    assert same_adapter(first, load(tmp_path / "ours", model)) and same_adapter(first, load(tmp_path / "back", model))
    for name in ("judger_lora/adapter_config.json", "cache_mapper_config.json", "checkpoint_meta.json"):
        assert json.loads((source / name).read_text()) == json.loads((tmp_path / "back" / name).read_text())
    one, other = (load_file(place / "judger_lora" / "adapter_model.safetensors") for place in (source, tmp_path / "back"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    one, other = (torch.load(place / "cache_mapper.pt", weights_only=True) for place in (source, tmp_path / "back"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    logits = [u_logits_of(place) for place in (source, tmp_path / "ours", tmp_path / "back")]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    (source / "checkpoint_meta.json").write_text("{broken")
    assert load(source, model).info == {}  # notes are no reason to refuse


def u_logits_of(place):
    """What a synthesizer with the adapter makes of three workers."""
    engine = golden_engine("tiny-qwen3")
    engine.folder = BASE  # so that the fingerprint is the file's
    return Synthesizer(engine, place).generate_from_caches(branches_of(engine), U, LOGITS).logits


def test_what_the_released_form_cannot_say_is_refused(tmp_path, model):
    official = {"profile": "official"}
    for adapter, message in [
        (made("low_rank"), "kind 'low_rank' on unrotated keys has no released form"),
        (made("affine", key_space="unrotated"), "kind 'affine' on unrotated keys has no released form"),
        (made("affine"), "merge options .profile minips. have no released form"),
    ]:
        with pytest.raises(MinipsError, match=message):
            save_released_form(adapter, tmp_path / "x")
    adapter = load(COMPONENTS / "qwen3-resized500", model)
    with pytest.raises(MinipsError, match="so it needs the base model"):
        save_released_form(adapter, tmp_path / "x")
    adapter.options = MergeOptions.from_dict({**official, "keep_turns": "all"})
    with pytest.raises(MinipsError, match="have no released form"):
        save_released_form(adapter, tmp_path / "x", model)
    assert not (tmp_path / "x").exists()
