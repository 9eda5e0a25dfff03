"""LoRA folders: read strictly, folded exactly, the base never touched. FAULTS items 69 to 75."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minips import Engine, MinipsError, Synthesizer
from minips.adapter import Adapter
from minips.config import MergeOptions, SamplingParams
from minips.lora import LoraAdapter, LoRALinear, fold, read_lora
from tests.support import GOLDEN, U, branches_of, golden_engine, prompt_ids, relative_error, tiny_config, tiny_engine

COMPONENTS = GOLDEN / "components"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "some/base"}
TINY = {"q_proj": (48, 96), "v_proj": (48, 32)}  # in, out


def tensors_of(prefix="base_model.model.model.", rank=2, layers=2, seed=0, **shapes):
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(layers):
        for name, (inner, outer) in (shapes or TINY).items():
            key = f"{prefix}layers.{layer}.self_attn.{name}"
            out[f"{key}.lora_A.weight"] = 0.2 * torch.randn(rank, inner, generator=generator)
            out[f"{key}.lora_B.weight"] = 0.2 * torch.randn(outer, rank, generator=generator)
    return out


def folder_of(tmp_path, tensors=None, **changes):
    folder = tmp_path / "lora"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors_of() if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def model():
    return tiny_engine().model


def refused(folder, model, match):
    """One line that fits, and a model that nothing was done to."""
    before = snapshot(model)
    with pytest.raises(MinipsError, match=match) as error:
        read_lora(folder, model)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    assert same(before, snapshot(model))


@pytest.mark.parametrize("rank, rslora, scale", [(16, False, 1.0), (64, False, 0.25), (16, True, 4.0), (64, True, 2.0)])
def test_faults_69_scale_with_and_without_rslora(tmp_path, model, rank, rslora, scale):
    tensors = tensors_of(rank=rank)
    adapter = read_lora(folder_of(tmp_path, tensors, r=rank, lora_alpha=16, use_rslora=rslora), model)
    assert {pair[2] for pair in adapter.pairs.values()} == {scale} and adapter.rank == rank
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    expected = model.model.layers[1].self_attn.v_proj.weight.double()
    expected = expected + scale * tensors[f"{key}B.weight"].double() @ tensors[f"{key}A.weight"].double()
    assert relative_error(fold(model, adapter).model.layers[1].self_attn.v_proj.weight, expected) < 1e-6


def test_rank_and_alpha_patterns(tmp_path, model):
    tensors = tensors_of()
    for part, shape in (("A", (3, 48)), ("B", (32, 3))):
        tensors[f"base_model.model.model.layers.1.self_attn.v_proj.lora_{part}.weight"] = torch.ones(shape)
    patterns = {"rank_pattern": {"layers.1.self_attn.v_proj": 3}, "alpha_pattern": {r".*\.0\..*q_proj": 7, "v_proj": 12}}
    adapter = read_lora(folder_of(tmp_path, tensors, **patterns), model)
    scales = {name.removeprefix("model.layers.").replace("self_attn.", ""): pair[2] for name, pair in adapter.pairs.items()}
    assert scales == {"0.q_proj": 3.5, "1.q_proj": 2.0, "0.v_proj": 6.0, "1.v_proj": 4.0}
    refused(folder_of(tmp_path, tensors), model, r"v_proj has rank 3, adapter_config.json says 2 \(1 such faults")
    for name, value in (("rank_pattern", {"q_proj": "2"}), ("alpha_pattern", {"(": 2}), ("alpha_pattern", [1])):
        refused(folder_of(tmp_path, **{name: value}), model, f"{name} is .*expected an object of plain module name patterns")


def one_pair(model, value, name="model.layers.0.self_attn.q_proj"):
    """An adapter that adds `value` to every entry of one weight."""
    out_size, in_size = model.get_submodule(name).weight.shape
    return LoraAdapter("one", {name: (torch.ones(1, in_size), torch.full((out_size, 1), value), 1.0)})


def test_faults_70_bf16_rounds_once():
    model = tiny_engine(dtype=torch.bfloat16).model
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)
    assert torch.equal(fold(model, one_pair(model, 0.003)).model.layers[0].self_attn.q_proj.weight, weight)  # lost: the step is 1/128
    assert fold(model, one_pair(model, 0.005)).model.layers[0].self_attn.q_proj.weight.unique().tolist() == [1.0078125]
    pair = LoraAdapter("two", {"model.layers.0.self_attn.q_proj": (torch.full((2, 48), 0.0025), torch.ones(96, 2), 1.0)})
    assert fold(model, pair).model.layers[0].self_attn.q_proj.weight.unique().tolist() == [1.0078125]  # each half alone is lost


def test_faults_70_folded_bf16_agrees_with_the_unfolded_update():
    engine = golden_engine("tiny-qwen3")
    lora = read_lora(COMPONENTS / "qwen3-a" / "judger_lora", engine.model)
    ids = prompt_ids(200, 3, 512)
    exact = tiny_engine(engine.config, tensors=fold(engine.model, lora).state_dict())
    rounded = tiny_engine(engine.config, tensors=dict(engine.model.state_dict()), dtype=torch.bfloat16)
    rounded = Synthesizer(rounded, Adapter("x", None, lora, MergeOptions()))
    params = SamplingParams(max_tokens=1, return_logits=True)
    one = exact.generate(ids, params).logits
    other = rounded.generate(text=ids, params=params, adapted=True).logits
    agreement = (one.argmax(-1) == other.argmax(-1)).float().mean()
    print(f"top-1 agreement of bf16 folded with fp32: {agreement:.3f}")
    assert agreement > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_71_the_base_is_byte_identical_after_100_synthesizers(dtype):
    engine = golden_engine("tiny-qwen3", dtype=dtype)
    stored = load_file(GOLDEN / "models" / "tiny-qwen3" / "model.safetensors")
    pointers = {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}
    first = None
    for _ in range(100):
        synthesizer = Synthesizer(engine, COMPONENTS / "qwen3-a")
        folded = synthesizer.model.state_dict()
        changed = {name for name, tensor in folded.items() if tensor.data_ptr() != pointers[name]}
        assert len(changed) == 12 and all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in changed)
        first = snapshot(synthesizer.model) if first is None else first
        assert same(first, folded)
        del synthesizer
    assert all(torch.equal(tensor, stored[name].to(dtype)) for name, tensor in engine.model.state_dict().items())
    assert pointers == {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}


def test_faults_72_two_adapters_on_one_engine_never_stack():
    engine = golden_engine("tiny-qwen3")
    one, two, again = (Synthesizer(engine, COMPONENTS / name) for name in ("qwen3-a", "qwen3-b", "qwen3-a"))
    base = snapshot(engine.model)
    for synthesizer in (one, two, again):
        for name, (a, b, scale) in synthesizer.adapter.lora.pairs.items():
            expected = base[f"{name}.weight"].double() + scale * (b.double() @ a.double())
            assert relative_error(synthesizer.model.state_dict()[f"{name}.weight"], expected) < 1e-6
    assert same(snapshot(one.model), snapshot(again.model)) and not same(snapshot(one.model), snapshot(two.model))
    text = {"text": prompt_ids(20, 1, 512), "params": SamplingParams(max_tokens=5)}
    before = [s.generate(**text, adapted=True).token_ids for s in (one, two)]
    plain = one.generate(**text).token_ids
    assert plain == two.generate(**text).token_ids == engine.generate(text["text"], text["params"]).token_ids
    assert before == [s.generate(**text, adapted=True).token_ids for s in (one, two)]
    branches = branches_of(engine)
    mixed = [s.generate_from_caches(branches, U, SamplingParams(max_tokens=4), consume=False).token_ids for s in (one, two, one)]
    assert mixed[0] == mixed[2] == again.generate_from_caches(branches, U, SamplingParams(max_tokens=4)).token_ids


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.model.", "base_model.model.", "model.", "", "base_model.model.model.language_model.", "model.language_model.model."],
)
def test_faults_73_known_prefixes_are_normalised(tmp_path, model, prefix):
    adapter = read_lora(folder_of(tmp_path, tensors_of(prefix)), model)
    plain = read_lora(folder_of(tmp_path), model)
    assert len(adapter.pairs) == 4 and adapter.pairs.keys() == plain.pairs.keys()
    assert all(torch.equal(adapter.pairs[name][0], plain.pairs[name][0]) for name in plain.pairs)


def test_faults_73_what_matches_nothing_is_refused(tmp_path, model):
    refused(folder_of(tmp_path, tensors_of("visual.blocks.")), model, "8 tensors match no module of the model: 'visual.blocks")
    deeper = tensors_of(layers=3)
    refused(folder_of(tmp_path, deeper), model, "4 tensors match no module of the model: .*layers.2")
    refused(folder_of(tmp_path, {**tensors_of(), **tensors_of("other.", layers=1)}), model, "4 tensors match no module")
    refused(folder_of(tmp_path, target_modules=["q_proj", "v_proj", "k_proj"]), model, "target_modules names 'k_proj', but the file has no")
    refused(folder_of(tmp_path, target_modules=["q_proj", "v_proj", "proj"]), model, "target_modules names 'proj'")
    refused(folder_of(tmp_path, {}, target_modules="all-linear"), model, "no LoRA tensors found")
    half = tensors_of()
    del half["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    refused(folder_of(tmp_path, half), model, "layers.0.self_attn.q_proj has lora_A only")
    refused(folder_of(tmp_path, {**tensors_of(), **tensors_of("model.")}), model, "is there twice")
    lora_head = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 48), "base_model.model.lm_head.lora_B.weight": torch.ones(97, 2)}
    refused(folder_of(tmp_path, {**tensors_of(), **lora_head}), model, "2 tensors match no module of the model: .*lm_head.lora_A")


def test_faults_74_another_base_gives_one_line_and_changes_nothing(tmp_path, model):
    wrong = tensors_of(q_proj=(3584, 96), v_proj=(3584, 32))
    refused(folder_of(tmp_path, wrong), model, r"q_proj.lora_A is \[2, 3584\], expected \[2, 48\] \(4 such faults; .* for 'some/base'\)")
    wrong = {**tensors_of(), "base_model.model.model.embed_tokens.weight": torch.zeros(149, 48)}
    refused(folder_of(tmp_path, wrong), model, r"embed_tokens.weight is \[149, 48\], the model has \[97, 48\].*resized.*'some/base'")
    for odd in (torch.ones(2), torch.tensor(1.0), torch.ones(2, 48, dtype=torch.int64), torch.full((2, 48), math.nan)):
        wrong = {**tensors_of(), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": odd}
        refused(folder_of(tmp_path, wrong), model, "expected a matrix of finite numbers")
    wrong = {**tensors_of(), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(0, 48)}
    refused(folder_of(tmp_path, wrong), model, "expected at least one row")


@pytest.mark.parametrize("tied", [False, True])
def test_faults_75_whole_modules_are_refused_by_word(tmp_path, tied):
    model = tiny_engine(tiny_config(tie_word_embeddings=tied)).model
    for key in ("base_model.model.lm_head.modules_to_save.weight", "base_model.model.model.embed_tokens.modules_to_save.default.weight"):
        refused(folder_of(tmp_path, {**tensors_of(), key: torch.zeros(97, 48)}), model, f"modules_to_save.*{key}")
    for key in ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"):
        name = key.rsplit(".", 2)[-2]
        refused(folder_of(tmp_path, {**tensors_of(), key: torch.zeros(97, 48)}), model, f"row 0 of .*{name}.* differs .*modules_to_save")
    refused(folder_of(tmp_path, modules_to_save=["lm_head"]), model, r"modules_to_save is \['lm_head'\], which is not supported")


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_dora", True), ("bias", "lora_only"), ("bias", "all"), ("lora_bias", True), ("fan_in_fan_out", True),
        ("layers_to_transform", [0]), ("layer_replication", [[0, 1]]), ("trainable_token_indices", [3]), ("target_parameters", ["x"]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"), ("r", 0), ("r", "8"),
        ("r", True), ("lora_alpha", None), ("lora_alpha", math.nan), ("peft_type", "IA3"), ("use_rslora", "yes"), ("alpha_pattern", 3),
    ],
)  # fmt: skip
def test_settings_that_are_not_implemented_are_refused_by_name(tmp_path, model, name, value):
    refused(folder_of(tmp_path, **{name: value}), model, f"{name} is ")


def test_files_that_are_missing_or_garbage(tmp_path, model):
    folder = folder_of(tmp_path)
    for name, content, message in [
        ("adapter_model.safetensors", None, "no such file; a LoRA folder holds"),
        ("adapter_model.safetensors", b"\x80\x04garbage", "not readable as safetensors"),
        ("adapter_model.safetensors", b"", "not readable as safetensors"),
        ("adapter_config.json", None, "no such file"),
        ("adapter_config.json", b"{", "not readable as JSON"),
        ("adapter_config.json", b"[]", "expected a JSON object"),
    ]:
        folder = folder_of(tmp_path)
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        refused(folder, model, message)


def test_rows_of_a_cut_vocabulary_equal_to_the_base_are_accepted_and_higher_ids_masked():
    engine = golden_engine("tiny-qwen3")
    synthesizer = Synthesizer(engine, COMPONENTS / "qwen3-resized500")
    assert synthesizer.adapter.lora.base_rows == 500 and synthesizer.valid_vocab == 500 and engine.valid_vocab == 512
    assert "model.embed_tokens.weight" not in synthesizer.adapter.lora.pairs
    assert synthesizer.model.lm_head.weight.data_ptr() == engine.model.lm_head.weight.data_ptr()
    with torch.no_grad():  # make a masked id the likeliest by far
        engine.model.lm_head.weight[505:] = 1e3 * torch.sign(engine.model.model.norm.weight)
        engine.model.lm_head.weight[506:] *= -1
    params = SamplingParams(max_tokens=20)
    assert max(engine.generate(prompt_ids(9, 2, 500), params).token_ids) >= 505
    assert max(synthesizer.generate(text=prompt_ids(9, 2, 500), params=params, adapted=True).token_ids) < 500


@pytest.mark.parametrize("row", [0, 7, 321, 499])
@pytest.mark.parametrize("key", ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"])
def test_one_changed_row_is_refused(tmp_path, row, key):
    folder = tmp_path / "lora"
    shutil.copytree(COMPONENTS / "qwen3-resized500" / "judger_lora", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[key][row, 3] += 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    refused(folder, golden_engine("tiny-qwen3").model, f"row {row} of {key} differs")


def test_embedding_and_head_of_different_length_are_refused(tmp_path):
    folder = tmp_path / "lora"
    shutil.copytree(COMPONENTS / "qwen3-resized500" / "judger_lora", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.lm_head.weight"][:400].clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    refused(folder, golden_engine("tiny-qwen3").model, "rows, expected the same")


@pytest.mark.parametrize("base, components", [("tiny-llama", "llama-a"), ("tiny-qwen3", "qwen3-a"), ("tiny-qwen3", "qwen3-b")])
def test_folded_logits_equal_peft(base, components):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ids = prompt_ids(40, 7, 512)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "models" / base, dtype=torch.float32)
    oracle = peft.PeftModel.from_pretrained(oracle, COMPONENTS / components / "judger_lora").eval()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    synthesizer = Synthesizer(golden_engine(base), COMPONENTS / components, parts="lora_only")
    params = SamplingParams(max_tokens=1, return_logits=True)
    found = synthesizer.generate(text=ids, params=params, adapted=True).logits
    assert relative_error(found[: len(ids)], expected) < 1e-4
    plain = synthesizer.generate(text=ids, params=params).logits
    assert relative_error(plain[: len(ids)], expected) > 1e-3


def test_lora_linear_equals_base_plus_fold(model):
    torch.manual_seed(0)
    base = model.model.layers[0].self_attn.v_proj
    layer, x = LoRALinear(base, 4, 8.0), torch.randn(5, 48)
    assert torch.equal(layer(x), base(x))  # starts as the base
    with torch.no_grad():
        layer.lora_B.normal_()
    adapter = LoraAdapter("new", {"model.layers.0.self_attn.v_proj": (layer.lora_A, layer.lora_B, layer.scale)})
    folded = fold(model, adapter).model.layers[0].self_attn.v_proj
    found = layer(x).detach()
    assert layer.scale == 2.0 and relative_error(found, folded(x).detach()) < 1e-5 and relative_error(found, base(x)) > 1e-2
    layer(x).sum().backward()
    assert layer.lora_A.grad is not None and layer.lora_B.grad is not None and base.weight.grad is None
    assert not folded.weight.requires_grad


def test_faults_74_another_declared_base_is_a_warning(tmp_path, model):
    engine = Engine(model, model.config, folder=tmp_path / "this-model")
    folder = folder_of(tmp_path, tensors_of())
    with pytest.warns(UserWarning, match="the adapter was made for 'base', the model is 'this-model'"):
        Synthesizer(engine, folder)
