"""Tokens chosen on the device as the host chooses them, decode steps compiled by Inductor, and the plan of bench/gpu_check.py. FAULTS items 57, 59."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from minips import Engine, EngineConfig, MinipsError, SamplingParams, Synthesizer, compiled, compiling, cuda_graph, sampling
from minips.cuda_graph import draw
from minips.sampling import RowSampler
from minips.lora import fold
from tests.support import U, branches_of, prompt_ids, tiny_config, tiny_engine
from tests.test_cuda_graph import Doubled, forks, graphed

no_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")


@pytest.mark.parametrize("vocab", [40, 1500])
def test_the_device_draws_as_the_host_does(vocab):
    generator = torch.Generator().manual_seed(vocab)
    settings = [{}, {"top_k": 1}, {"top_k": 7}, {"top_k": vocab}, {"top_p": 0.0}, {"top_p": 0.6}, {"top_p": 0.95}, {"min_p": 0.2}]
    settings += [{"top_k": 9, "top_p": 0.8}, {"top_p": 0.8, "min_p": 0.1}, {"top_k": 6, "top_p": 0.5, "min_p": 0.3}]
    params = [SamplingParams(temperature=temperature, **own) for temperature in (0.3, 1.0, 2.0) for own in settings]
    for _ in range(20):
        logits = 3 * torch.randn(len(params), vocab, generator=generator)
        uniforms = torch.rand(len(params), generator=generator, dtype=torch.float64).tolist()
        uniforms[:2] = [0.0, 1 - 2**-53]
        numbers = torch.tensor([[*cuda_graph._numbers(row, vocab), u] for row, u in zip(params, uniforms)], dtype=torch.float64)
        found = draw(logits, numbers, True).tolist()
        assert found == [sampling._draw(row, own, u) for row, own, u in zip(logits, params, uniforms)]
        plain = [at for at, row in enumerate(params) if row.top_k in (0, vocab) and row.top_p == 1]
        assert draw(logits[plain], numbers[plain], False).tolist() == [found[at] for at in plain]


def test_ids_beyond_the_vocabulary_are_never_chosen():
    engine = graphed(tiny_engine())
    logits = torch.zeros(2, 97)
    logits[:, 90:] = 50.0
    rows = [RowSampler(SamplingParams(temperature=t, seed=1), None, [], 97, 90) for t in (0.0, 1.0)]
    for _ in range(20):
        tokens, _ = engine.graphs.choose(logits, rows).wait()
        assert max(tokens) < 90 and tokens[0] == 0


# Compiled layers


BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, no_compiler])])


@pytest.fixture
def counted(monkeypatch, backend):
    """Dynamo's counters; compilation by `backend`, and room for one form of each function only."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        yield counters


def compiled_engine(kv_dtype="auto", max_kv_tokens=4000):
    base = tiny_engine(tiny_config(max_position_embeddings=1024))
    settings = EngineConfig("cpu", "auto", kv_dtype, 4, max_kv_tokens)
    return Engine(base.model, base.config, settings=settings, compile=True), Engine(base.model, base.config, settings=settings)


@BACKENDS
def test_a_compiled_layer_is_compiled_once_for_50_lengths_on_a_cpu(capsys, counted):  # FAULTS 57, 59
    engine, eager = compiled_engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for length in [*range(1, 48), 255, 256, 700]:
        assert engine.generate(prompt_ids(length), params).token_ids == eager.generate(prompt_ids(length), params).token_ids
    assert counted["stats"]["unique_graphs"] == 1 and not counted["graph_break"]
    assert engine.stats()["compiled_steps"] == 100 and engine.stats()["eager_steps"] == 0
    for rows in (2, 3, 5, 9):
        found = [[row.token_ids for row in each.generate_batch([prompt_ids(n) for n in range(1, rows + 1)], params)] for each in (engine, eager)]
        assert found[0] == found[1]
    assert counted["stats"]["unique_graphs"] == 2 and engine.stats()["eager_steps"] == 0
    said = capsys.readouterr()
    assert said.err.count("compiling a decoder layer for") == 2 and " s\n" in said.err and not said.out


@BACKENDS
def test_steps_are_compiled_ahead_where_a_screen_is_to_hear_of_it(capsys, counted, monkeypatch):
    engine, eager = compiled_engine()
    said = []
    monkeypatch.setattr(compiling, "say", said.append)
    engine.graphs.compile_ahead(engine.model)
    assert len(said) == 4 and engine.stats()["compiled_steps"] == 0
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for prompts in ([prompt_ids(5)], [prompt_ids(n) for n in (4, 300, 7)]):
        found = [[row.token_ids for row in each.generate_batch(prompts, params)] for each in (engine, eager)]
        assert found[0] == found[1]
    assert len(said) == 4 and counted["stats"]["unique_graphs"] == 2 and not capsys.readouterr().err and engine.check()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, no_compiler])])
@pytest.mark.parametrize("counts", [[2, 3], [4, 6, 2], [8, 1, 5]], ids=str)
def test_sizes_that_are_equal_when_a_layer_is_compiled_need_not_stay_so(counted, counts):
    """Rows as many as the KV heads (2), a page's tokens (4) or the heads (8 / 2): shapes that are traced, unlike with the eager backend."""
    engine, eager = compiled_engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for rows in counts:
        prompts = [prompt_ids(n) for n in range(1, rows + 1)]
        found = [[row.token_ids for row in each.generate_batch(prompts, params)] for each in (engine, eager)]
        assert found[0] == found[1]
    for length in (5, 300, 700):
        assert engine.generate(prompt_ids(length), params).token_ids == eager.generate(prompt_ids(length), params).token_ids
    assert counted["stats"]["unique_graphs"] == 2 and engine.stats()["eager_steps"] == 0


@BACKENDS
def test_in_graphs_a_layer_is_compiled_once_a_bucket(monkeypatch, counted):
    monkeypatch.setattr(cuda_graph, "NARROWEST", 16)
    engine, eager = (graphed(tiny_engine(), compile=compile) for compile in (True, False))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    found = [[row.token_ids for row in each.decode(forks(each, 3), params)] for each in (engine, eager)]
    assert found[0] == found[1]
    assert engine.graphs.captures == counted["stats"]["unique_graphs"] > 2 and engine.graphs.eager_steps == 0


@pytest.mark.parametrize("backend", ["eager"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_weight_sets_share_a_compiled_layer(tmp_path, counted, kv_dtype):
    """Base and folded weights have matrices of the same form; a merged context and sampling go through it too."""
    engine, eager = compiled_engine(kv_dtype)
    found = []
    for each in (engine, eager):
        synthesizer = Synthesizer(each)
        synthesizer.model = fold(each.model, Doubled(each.config, 0.3))
        branches = branches_of(each)
        outputs = each.decode(branches, SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=1, ignore_eos=True))
        answer = synthesizer.generate_from_caches(branches, U, SamplingParams(max_tokens=9, ignore_eos=True))
        found.append([*(row.token_ids for row in outputs), answer.token_ids])
        assert each.check()
    merges = kv_dtype == "auto"  # are compiled too
    assert found[0] == found[1] and counted["stats"]["unique_graphs"] == 2 + merges and engine.stats()["compiled_steps"] > 8


@pytest.mark.parametrize("backend", ["eager"])
def test_steps_that_copy_too_much_are_not_compiled(monkeypatch, counted):
    monkeypatch.setattr(compiled, "LARGEST", 512)
    engine, _ = compiled_engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate_batch([prompt_ids(2)] * 2, params)
    engine.generate_batch([prompt_ids(2)] * 3, params)
    assert engine.stats()["compiled_steps"] == 1 and engine.stats()["eager_steps"] == 1


@no_compiler
def test_compiling_without_a_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MinipsError, match=r"^compile: .*C\+\+ compiler.*no-such-compiler"):
        compiled_engine()
    monkeypatch.delenv("CXX")
    broken = torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": (None, "false")})
    with broken, pytest.raises(MinipsError, match="^compile: ") as found:
        compiled_engine()[0].generate(prompt_ids(3), SamplingParams(max_tokens=3, ignore_eos=True))
    assert "\n" not in str(found.value) and "TORCHDYNAMO" not in str(found.value)


# The check of a GPU

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import gpu_check
import gpu_parts


@pytest.fixture(autouse=True)
def no_graphs_left():
    yield
    torch._dynamo.reset()


def test_the_plan_of_the_gpu_check_runs_on_a_cpu(tmp_path, capsys):
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path / "out")]) == 0
    page, data = (tmp_path / "out" / "gpu_check.md").read_text(), json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert capsys.readouterr().out.strip() == page.strip() and list(data["parts"]) == gpu_check.NAMES
    checks = gpu_check.checks_of(data)
    assert len(checks) == 16 and all(checks.values()) and "16 of 16 checks held." in page
    assert data["parts"]["captures"]["captures"] == 3 and data["parts"]["offload"]["parked_bytes"] > 0
    assert {case["m"] for case in data["parts"]["decode"]["cases"]} == {1, 4, 32} and {
        case["m"] for case in data["parts"]["ttft"]["cases"]
    } == {2, 4, 32}
    assert set(data["parts"]["forms"]["forms"]) == {"bf16", "int8 weights", "int4 weights", "int8 pages", "fp8 pages"}


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    def equality(bench):
        raise RuntimeError("no kernel image\nis there")

    monkeypatch.setattr(gpu_check, "PARTS", (gpu_parts.bandwidth, equality, gpu_parts.offload))
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu_check.md").read_text()
    assert "not: equality" in page and "**failed**: RuntimeError: no kernel image" in page and "MB parked" in page
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), "--seconds", "0", "--only", "offload"]) == 0
    assert "**left_out**: after 0 of 0.0 seconds" in (tmp_path / "gpu_check.md").read_text()


def test_without_a_gpu_the_check_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().err == "bench/gpu_check.py: error: there is no CUDA device; --dry-run walks the plan on a CPU\n"
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--only", "decode,speed"])
    assert stop.value.code == 2
