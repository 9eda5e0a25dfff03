"""Tokens chosen on the device as the host chooses them, and decode steps compiled by Inductor. FAULTS items 57, 59."""

import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from minips import SamplingParams, cuda_graph, sampling
from minips.cuda_graph import draw
from minips.sampling import RowSampler
from tests.support import prompt_ids, tiny_config, tiny_engine
from tests.test_cuda_graph import forks, graphed

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


def compiled_engine(monkeypatch, backend, narrowest):
    monkeypatch.setattr(cuda_graph, "NARROWEST", narrowest)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()  # the step is one function for all engines
    counters.clear()
    return graphed(tiny_engine(tiny_config(num_hidden_layers=1)), compile=True)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, no_compiler])])
def test_a_compiled_step_is_compiled_once_for_50_lengths(capsys, monkeypatch, backend):  # FAULTS 57, 59
    engine, eager = compiled_engine(monkeypatch, backend, 64), tiny_engine(tiny_config(num_hidden_layers=1))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for length in range(1, 51):
        assert engine.generate(prompt_ids(length), params).token_ids == eager.generate(prompt_ids(length), params).token_ids
    assert engine.graphs.captures == 1 and counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert engine.graphs.replays == 100 and engine.graphs.eager_steps == 0
    said = capsys.readouterr()
    assert said.err.startswith("compiling the decode step for 1 row of up to 64 tokens") and " s\n" in said.err and not said.out


def test_every_bucket_is_compiled(monkeypatch):
    """Inductor gives up at eight forms of one function unless told otherwise."""
    engine = compiled_engine(monkeypatch, "eager", 16)
    for count in (1, 2, 4, 8):
        engine.decode(forks(engine, count), SamplingParams(max_tokens=70, ignore_eos=True))
    assert engine.graphs.captures == counters["stats"]["unique_graphs"] == 13 and engine.graphs.eager_steps == 0
