"""Captured decode steps, on a stand-in for CUDA graphs that checks what a replay relies on. FAULTS items 55 to 59."""

import gc

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer, cuda_graph
from minips.attention import TableAttention
from minips.config import EngineConfig
from minips.cuda_graph import DecodeGraphs, Inputs
from minips.engine import Engine
from minips.kv_storage import parts
from minips.lora import fold
from minips.model import Model
from tests.support import LOGITS, PREFIX, U, branches_of, chat_engine, prompt_ids, random_tensors, tiny_config, tiny_engine

STOPS = tuple(range(0, 97, 9))


class FakeCapture:
    """Keeps the step and calls it at each replay, into the same result, after checks; then nothing of its inputs is left."""

    def __init__(self, pool):
        self.pool = pool

    def stores(self):
        return [part for store in (*self.pool.keys, *self.pool.values) for part in parts(store)]

    def addresses(self, inputs):
        return [tensor.data_ptr() for tensor in (*vars(inputs).values(), *self.stores())]

    def __call__(self, step, inputs):
        before = [part.clone() for part in self.stores()]
        result = step()
        for old, new in zip(before, self.stores()):  # capturing and warming up change the null page alone
            assert torch.equal(bits(old)[1:], bits(new)[1:])
        places = self.addresses(inputs)

        def replay():
            assert self.addresses(inputs) == places
            for tensor in vars(inputs).values():
                assert int(tensor.min()) >= 0, "an input was not refreshed"
            real = inputs.table[:, 0] != 0
            count = int(real.sum())
            assert real[:count].all() and (inputs.lengths[count:] == 1).all(), "padding stands behind the rows, one token each"
            assert not inputs.table[count:].any() and not inputs.positions[count:].any()
            slots = inputs.table.gather(1, inputs.lengths[:, None] - 1)[:count, 0].tolist()
            assert len(set(slots)) == count
            before = [part.clone() for part in self.stores()]
            result.copy_(step())
            for old, new in zip(before, self.stores()):
                changed = (bits(old) != bits(new)).flatten(2).any(2).flatten().nonzero().flatten().tolist()
                assert set(changed) - {0} <= set(slots), "a row wrote outside its own slot"
            for tensor in vars(inputs).values():
                tensor.fill_(-1)

        return replay, result


def bits(tensor):
    return tensor.view(torch.uint8)  # NaN too equals itself


def graphed(engine, **options):
    engine.graphs = DecodeGraphs(engine.pool, FakeCapture(engine.pool), **options)
    return engine


@pytest.fixture(autouse=True)
def narrow_tables(monkeypatch):
    monkeypatch.setattr(cuda_graph, "NARROWEST", 16)


def forks(engine, count):
    with engine.prefill(PREFIX) as prefix:
        return engine.fork(prefix, [prompt_ids(1 + 3 * seed, seed) for seed in range(count)])


def state(branch):
    return (branch.output_ids, branch.text, branch.finish_reason, branch.token_ids, branch.next_position, branch.segments[-1].stop_token)


def decoded(engine, params, count):
    seen = []
    branches = engine.decode(forks(engine, count), params, on_token=lambda *event: seen.append(event))
    assert engine.check()
    return branches, seen


def same(one, two):
    assert [state(branch) for branch in one[0]] == [state(branch) for branch in two[0]] and one[1] == two[1]
    for a, b in zip(one[0], two[0]):
        assert (a.next_logits is None) == (b.next_logits is None)
        assert a.next_logits is None or torch.allclose(a.next_logits, b.next_logits, atol=1e-4)


def mixed(count):
    """Greedy and sampled rows, of different lengths, some of which stop early."""
    filters = [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.05}, {}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.7}]
    rows = [{"temperature": 1.0, **filters[at % len(filters)]} for at in range(count)]
    return [
        SamplingParams(max_tokens=(4 * at) % 23, seed=at, stop_token_ids=STOPS if at % 2 else (), **row) for at, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize("count", range(1, 10))
def test_graphs_and_eager_give_the_same_tokens(count):  # FAULTS 58
    engine = graphed(tiny_engine())
    same(decoded(engine, mixed(count), count), decoded(tiny_engine(), mixed(count), count))
    assert engine.graphs.eager_steps == 0 and engine.graphs.replays > 0


def test_rows_that_share_their_parameters_and_stop_at_different_times():
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop_token_ids=STOPS)
    graphs, eager = decoded(graphed(tiny_engine()), params, 8), decoded(tiny_engine(), params, 8)
    same(graphs, eager)
    assert len({len(branch.output_ids) for branch in graphs[0]}) > 3


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_pages_of_8_bits(kv):
    def engine():
        config = tiny_config()
        made = Engine(Model.from_tensors(config, random_tensors(config)), config, settings=settings)
        for part in (part for store in (*made.pool.keys, *made.pool.values) for part in parts(store)):
            part.zero_()
        return made

    settings = EngineConfig("cpu", "auto", kv, 4, 600)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    same(decoded(graphed(engine()), params, 3), decoded(engine(), params, 3))


def test_one_capture_for_each_bucket_and_weight_set():
    engine = graphed(tiny_engine())
    graphs, params = engine.graphs, SamplingParams(max_tokens=10, ignore_eos=True)
    decoded(engine, params, 3)  # prefix 10, own 1 to 7, then 10 more: at most 27 tokens
    assert set(graphs._graphs[engine.model]) == {(4, 24), (4, 32)} and graphs.captures == 2
    decoded(engine, params, 4)
    decoded(engine, params, 3)
    assert graphs.captures == 2 and graphs.replays == 30
    decoded(engine, params, 1)
    assert set(graphs._graphs[engine.model]) == {(4, 24), (4, 32), (1, 16), (1, 24)} and graphs.captures == 4


def test_more_rows_than_the_largest_bucket_run_eagerly():
    engine = graphed(tiny_engine(max_kv_tokens=6000))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    same(decoded(engine, params, 33), decoded(tiny_engine(max_kv_tokens=6000), params, 33))
    assert [engine.stats()[f"graph_{name}"] for name in ("replays", "captures", "eager_steps")] == [0, 0, 3]


def test_tables_that_are_too_large_run_eagerly(monkeypatch):
    monkeypatch.setattr(cuda_graph, "LARGEST", 64)
    engine = graphed(tiny_engine())
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    same(decoded(engine, params, 2), decoded(tiny_engine(), params, 2))
    assert engine.graphs.replays > 0 and engine.graphs.eager_steps > 0  # 2 rows of more than 32 tokens


def test_rows_join_and_go_on():
    def run(engine):
        params = SamplingParams(max_tokens=7, temperature=0.8, seed=2, stop_token_ids=STOPS)
        some = forks(engine, 2)
        engine.decode(some, params)
        engine.extend(some, [prompt_ids(3, 70), prompt_ids(5, 71)])
        together = [*some, *forks(engine, 3)]
        engine.decode(together, params)
        first = [state(branch) for branch in together]
        engine.decode(together[1:4], params)
        assert engine.check()
        return first + [state(branch) for branch in together[1:4]]

    assert run(graphed(tiny_engine())) == run(tiny_engine())


class Doubled:
    """An adapter as `fold` reads it, of any strength."""

    name, config = "test", {}

    def __init__(self, config, strength):
        out, hidden = config.num_attention_heads * config.head_dim, config.hidden_size
        generator = torch.Generator().manual_seed(7)
        a, b = torch.randn(2, hidden, generator=generator), torch.randn(out, 2, generator=generator)
        self.pairs = {f"model.layers.{layer}.self_attn.q_proj": (a, b, strength) for layer in range(config.num_hidden_layers)}


def test_merged_contexts_and_folded_weights():
    """Pages that a merge turns in place need no new capture; other weights do, and theirs go with them."""

    def run(engine, captures=None):
        answers = []
        for strength in (0.0, 0.05, 0.3):
            synthesizer = Synthesizer(engine)
            if strength:
                synthesizer.model = fold(engine.model, Doubled(engine.config, strength))
            for turn in range(2):
                branches = branches_of(engine)
                engine.decode(branches, SamplingParams(max_tokens=4, ignore_eos=True))
                answers.append(synthesizer.generate_from_caches(branches, U, SamplingParams(max_tokens=9, ignore_eos=True)).token_ids)
                if captures is not None:
                    captures.append(engine.graphs.captures)
            del synthesizer
            gc.collect()
        assert engine.check()
        return answers

    captures, engine = [], graphed(tiny_engine())
    answers = run(engine, captures)
    assert answers == run(tiny_engine()) and answers[0] == answers[1] != answers[4]
    assert captures[0::2] == captures[1::2] and captures[0] < captures[2] < captures[4]
    assert list(engine.graphs._graphs) == [engine.model]


def test_stop_strings():
    found = []
    for engine in (graphed(chat_engine()), chat_engine()):
        with engine.prefill("Say something.") as prefix:
            branches = engine.fork(prefix, ["a", "b", "c"])
        engine.decode(branches, SamplingParams(max_tokens=60, temperature=1.0, seed=1, stop=("e", "q", "<", "ab")))
        assert engine.check()
        found.append([(state(branch), branch.next_logits is None) for branch in branches])
        streamed = list(engine.stream("And now?", SamplingParams(max_tokens=40, temperature=1.0, seed=4, stop=("e",))))
        found[-1].append(streamed)
    assert found[0] == found[1] and any(row[1] for row in found[0][:3])


def test_logits_logprobs_and_penalties_come_from_the_graph_and_stay():  # FAULTS 56
    for params in (LOGITS, SamplingParams(max_tokens=12, logprobs=3, repetition_penalty=1.3, return_logits=True, temperature=0.5, seed=2)):
        engine = graphed(tiny_engine())
        mine = engine.decode(forks(engine, 3), params)
        kept = [branch.logits.clone() for branch in mine]
        replays = engine.graphs.replays
        decoded(engine, SamplingParams(max_tokens=12), 3)
        eager = tiny_engine()
        theirs = eager.decode(forks(eager, 3), params)
        assert replays and [state(branch) for branch in mine] == [state(branch) for branch in theirs]
        for branch, before, other in zip(mine, kept, theirs):
            assert torch.equal(branch.logits, before) and torch.allclose(before, other.logits, atol=1e-4)
            assert (branch.logprobs is None) == (other.logprobs is None)
            assert not branch.logprobs or [list(entry) for entry in branch.logprobs] == [list(entry) for entry in other.logprobs]


def test_logits_of_100_steps_of_changing_batches():  # FAULTS 55: the stand-in wipes every input after each replay
    engine, eager = graphed(tiny_engine()), tiny_engine()
    params = [SamplingParams(max_tokens=100 - 30 * at, return_logits=True, ignore_eos=True) for at in range(4)]
    for mine, other in zip(engine.decode(forks(engine, 4), params), eager.decode(forks(eager, 4), params)):
        assert len(mine.output_ids) == len(mine.logits) - 1 == len(other.output_ids)
        assert torch.allclose(mine.logits, other.logits, atol=1e-4)


def test_inputs_of_another_shape_are_an_error():  # FAULTS 55
    inputs = Inputs.padding(2, 16, torch.device("cpu"))
    numbers = torch.ones(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="rows"):
        inputs.fill(numbers, numbers, numbers, inputs.table)
    with pytest.raises(AssertionError, match="tables"):
        inputs.fill(numbers[:1], numbers[:1], numbers[:1], torch.zeros(2, 32, dtype=torch.int64))


def test_streams_that_take_turns_share_a_graph():
    def run(engine):
        streams = [engine.stream(prompt_ids(5, seed), SamplingParams(max_tokens=9, ignore_eos=True)) for seed in range(2)]
        alone = [engine.generate(prompt_ids(5, seed), SamplingParams(max_tokens=9, ignore_eos=True)).token_ids for seed in range(2)]
        generators = [stream._generator for stream in streams]  # ids only: a piece of text would be empty
        for _ in range(9):
            for generator in generators:
                next(generator)
        results = []
        for generator in generators:
            with pytest.raises(StopIteration) as stop:
                next(generator)
            results.append(stop.value.value.token_ids)
        assert results == alone
        return results

    engine = graphed(tiny_engine())
    assert run(engine) == run(tiny_engine()) and engine.graphs.captures == 1


def test_a_callback_that_raises_leaves_the_branches_as_they_were():
    engine = graphed(tiny_engine())
    branches = forks(engine, 3)
    before, free = [state(branch) for branch in branches], engine.pool.num_free

    def stop(row, token, text):
        if engine.graphs.replays == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.decode(branches, SamplingParams(max_tokens=9, ignore_eos=True), on_token=stop)
    assert [state(branch) for branch in branches] == before and engine.pool.num_free == free and engine.check()


def test_broken_weights_are_named_a_step_late():
    tensors = random_tensors(tiny_config())
    tensors["model.embed_tokens.weight"][5] = float("nan")
    engine = graphed(tiny_engine(tensors=tensors, poison=0.0))
    broken = engine.prefill([1, 2, 3])
    with pytest.raises(MinipsError, match=r"row 1, step 0: the logits are not finite"):
        engine.decode([engine.prefill([4, 4]), engine.prefill([2, 5])], SamplingParams(max_tokens=3))
    assert engine.decode([broken], SamplingParams(max_tokens=1))[0].output_ids and engine.check()


@pytest.mark.parametrize("kind", ["reweighted", "debug"])
def test_what_graphs_do_not_cover_runs_eagerly(kind):
    def run(engine):
        engine.model.debug = kind == "debug"
        options = {"branch_temperature": 0.7, "branch_scale": 0.8} if kind == "reweighted" else {}
        return Synthesizer(engine, options=options).generate_from_caches(branches_of(engine), U, SamplingParams(max_tokens=6)).token_ids

    engine = graphed(tiny_engine())
    assert run(engine) == run(tiny_engine())
    assert engine.graphs.replays == 0 and engine.graphs.eager_steps == 5


def test_the_first_tokens_do_not_wait_for_a_capture():
    engine, seen = graphed(tiny_engine()), []
    for batch in range(2):
        branches = forks(engine, 3)
        engine.decode(branches, SamplingParams(max_tokens=9), on_token=lambda *_: seen.append(engine.graphs.captures))
        assert seen[:3] == [0, 0, 0] and seen[-1] == engine.graphs.captures > 0
    steps = len(seen) // 6 - 1
    assert engine.graphs.replays == 2 * (steps + 1)  # drained: the last tokens too are fed


def test_a_step_that_cannot_be_captured_is_warned_of_once_and_decoding_goes_on():
    def capture(step, inputs):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    engine = tiny_engine()
    engine.graphs = DecodeGraphs(engine.pool, capture)
    with pytest.warns(UserWarning, match=r"without CUDA graphs.*operation not permitted\\nwhen") as warned:
        found = [decoded(engine, mixed(4), 4) for _ in range(2)]
    for one in found:
        same(one, decoded(tiny_engine(), mixed(4), 4))
    assert len(warned) == 1 and engine.graphs.captures == engine.graphs.replays == 0 < engine.graphs.eager_steps


def test_no_memory_for_a_capture_is_not_taken_for_a_step_that_cannot_be_captured():
    def capture(step, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = tiny_engine()
    engine.graphs = DecodeGraphs(engine.pool, capture)
    with pytest.raises(MinipsError, match="memory"):
        decoded(engine, mixed(4), 4)
    assert engine.check() and not engine.graphs._failed


@pytest.mark.parametrize("made, first", [(False, True), (True, False), (True, True)])
def test_inference_mode_of_the_caller_leaves_nothing_behind(made, first):
    """Where the engine is made, and where it first decodes, inside of torch.inference_mode(), and later calls outside."""
    with torch.inference_mode(made):
        engine = graphed(tiny_engine())
    with torch.inference_mode(first):
        same(decoded(engine, mixed(3), 3), expected := decoded(tiny_engine(), mixed(3), 3))
    same(decoded(engine, mixed(3), 3), expected)
    answers = [Synthesizer(engine).generate_from_caches(branches_of(engine), U, SamplingParams(max_tokens=6)).token_ids for _ in range(2)]
    assert answers[0] == answers[1]


def test_unfilled_slots_of_a_table_do_not_matter():
    keys, values = torch.full((2, 4, 2, 8), float("nan")), torch.full((2, 4, 2, 8), float("nan"))
    keys.flatten(0, 1)[4:6], values.flatten(0, 1)[4:6] = torch.randn(2, 2, 2, 8)
    attend = TableAttention([keys], [values], torch.tensor([[4, 5, 6, 7, 0, 0]]), torch.tensor([3]))
    out = attend(0, *(torch.randn(1, heads, 8) for heads in (6, 2, 2)))
    assert out.shape == (1, 6, 8) and torch.isfinite(out).all() and keys.flatten(0, 1)[7].isnan().all()


def test_graphs_are_refused_where_there_are_none():
    config = tiny_config()
    with pytest.raises(MinipsError, match="^cuda_graphs: .*on cpu"):
        Engine(Model.from_tensors(config, random_tensors(config)), config, settings=tiny_engine().settings, cuda_graphs=True)
    assert tiny_engine().graphs is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [1, 3, 9])
def test_on_cuda_graphs_and_eager_give_the_same_tokens(count):
    def engine(graphs):
        config = tiny_config()
        tensors = {name: tensor.cuda() for name, tensor in random_tensors(config).items()}
        return Engine(Model.from_tensors(config, tensors), config, settings=tiny_engine().settings, cuda_graphs=graphs)

    with_graphs = engine(None)
    same(decoded(with_graphs, mixed(count), count), decoded(engine(False), mixed(count), count))
    assert with_graphs.graphs.replays > 0 and with_graphs.graphs.eager_steps == 0
