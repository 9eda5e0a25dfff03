"""2,000 mixed requests on one engine: flat memory, the books right after each, and the answers of solo runs. FAULTS 45, 46, 82."""

import gc
import random
import shutil
import sys
from pathlib import Path

import pytest

from minips import MinipsError, SamplingParams, Synthesizer
from minips.decoding import open_writers
from tests.support import U, chat_engine, prompt_ids

REQUESTS = 2000
KINDS = ("generate", "stream", "cut", "drop", "decode", "broken", "waves", "turns", "merge", "keep", "batch", "score", "files", "refused")
OPTIONS = [
    {}, {"layout": "sequential"}, {"keep_prefix": False}, {"rerotate": False}, {"keep_turns": "all"}, {"keep_stop_token": True},
    {"profile": "official"}, {"branch_temperature": 0.8, "branch_scale": 1.2}, {"keep_prefix": False, "anchor": "zero"},
]  # fmt: skip


class Stop(Exception):
    pass


class Requests:
    """Requests that depend on their number alone, so that another engine gives the same answers to the same numbers."""

    def __init__(self, engine, folder: Path):
        self.engine, self.folder = engine, folder
        self.synthesizers = [Synthesizer(engine, options=options) for options in OPTIONS]

    def __call__(self, number: int) -> object:
        rng = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        params = SamplingParams(
            max_tokens=rng.randint(1, 10), temperature=rng.choice((0.0, 1.0)), seed=number, stop_token_ids=(rng.randrange(97),),
            logprobs=rng.choice((0, 2)), repetition_penalty=rng.choice((1.0, 1.2)), return_logits=rng.random() < 0.2,
        )  # fmt: skip
        return getattr(self, kind)(rng, params)

    def ids(self, rng, low=2, high=12):
        return prompt_ids(rng.randint(low, high), rng.randrange(10**6))

    def forks(self, rng):
        """The branches of a new prefix, with a way to close them all."""
        with self.engine.prefill(self.ids(rng, 8, 20)) as root:
            return Closing(self.engine.fork(root, [self.ids(rng, 0, 6) for _ in range(rng.randint(1, 5))]))

    def generate(self, rng, params):
        return self.engine.generate(self.ids(rng), params).token_ids

    def stream(self, rng, params):
        with self.engine.stream(self.ids(rng), params) as stream:
            text = "".join(stream)
            return stream.result.token_ids, text == stream.result.text

    def cut(self, rng, params):
        with self.forks(rng) as branches:
            self.engine.decode(branches, SamplingParams(max_tokens=3))
            with self.synthesizers[0].stream_from_caches(branches, U, params) as stream:
                return [next(stream, None) for _ in range(rng.randint(0, 3))]

    def drop(self, rng, params):
        stream = self.engine.stream(self.ids(rng), params)
        return [next(stream, None) for _ in range(rng.randint(0, 2))]

    def decode(self, rng, params):
        with self.forks(rng) as branches:
            seen = []
            self.engine.decode(branches, params, on_token=lambda *event: seen.append(event))
            return [branch.output_ids for branch in branches], seen

    def broken(self, rng, params):
        with self.forks(rng) as branches:
            left, before = rng.randint(1, 6), [branch.token_ids[:] for branch in branches]

            def callback(*_):
                nonlocal left
                left -= 1
                if not left:
                    raise Stop

            try:
                self.engine.decode(branches, params, on_token=callback)
            except Stop:
                assert [branch.token_ids for branch in branches] == before
            return [branch.output_ids for branch in branches]

    def waves(self, rng, params):
        """With so much of the pool taken that the workers cannot all run at once."""
        with self.forks(rng) as branches:
            long = SamplingParams(max_tokens=40, temperature=1.0, seed=params.seed, stop_token_ids=tuple(range(0, 300, 3)))
            engine, kept = self.engine, 14 + 5 * len(branches)
            taken = (engine.stats()["free_pages"] - kept) * engine.pool.page_size
            (writer,) = open_writers([engine.empty_branch()], [taken], "context", "the rest of the pool")
            try:
                engine.decode(branches, long)
            finally:
                writer.abort()
            return [branch.output_ids for branch in branches]

    def turns(self, rng, params):
        with self.forks(rng) as branches:
            self.engine.decode(branches, params)
            self.engine.extend(branches, [self.ids(rng) for _ in branches])
            self.engine.encode(branches[:1], [self.ids(rng)])
            self.engine.decode(branches, params)
            return rng.choice(self.synthesizers[:5]).generate_from_caches(branches, U, params).token_ids

    def merge(self, rng, params):
        with self.forks(rng) as branches:
            self.engine.encode(branches, [self.ids(rng) for _ in branches])
            return rng.choice(self.synthesizers).generate_from_caches(branches, U, params).token_ids

    def keep(self, rng, params):
        """Branches that stay, a context that is asked twice, and one that is only dropped."""
        synthesizer = rng.choice(self.synthesizers)
        with self.forks(rng) as branches:
            self.engine.decode(branches, SamplingParams(max_tokens=4, ignore_eos=True))
            synthesizer.merge(branches, consume=False)
            with synthesizer.merge(branches, consume=False) as context:
                answers = [synthesizer.generate(context=context, prompt=self.ids(rng), params=params).token_ids for _ in range(2)]
                return answers, synthesizer.score(context, U, [5, 6]).greedy

    def batch(self, rng, params):
        prompts = [self.ids(rng) for _ in range(3)]
        return [result.token_ids for result in self.engine.generate_batch(prompts, params, targets=[[7, 8], [9], [1, 2, 3]])]

    def score(self, rng, params):
        return self.engine.score(self.ids(rng), self.ids(rng)).greedy

    def files(self, rng, params):
        folder = self.folder / "branches"
        with self.forks(rng) as branches:
            self.engine.decode(branches, params)
            self.engine.save_branches(branches, folder)
        try:
            with Closing(self.engine.load_branches(folder)) as loaded:
                self.engine.extend(loaded, [[1, 2]] * len(loaded))
                return [branch.output_ids for branch in self.engine.decode(loaded, params)]
        finally:
            shutil.rmtree(folder)

    def refused(self, rng, params):
        engine, branch = self.engine, self.engine.prefill([1, 2])
        branch.close()
        calls = (
            lambda: engine.generate([], params),
            lambda: engine.prefill([10**6]),
            lambda: engine.generate([1] * 3000, params),
            lambda: engine.generate([1], SamplingParams(max_tokens=0)),
            lambda: engine.decode([branch], params),
            lambda: engine.load_branches(self.folder / "nothing"),
            lambda: Synthesizer(engine, options={"layout": "square"}),
            lambda: self.synthesizers[0].merge([]),
            lambda: engine.stream([1] * 1190, SamplingParams(max_tokens=200)).finish(),
        )
        with pytest.raises(MinipsError):
            rng.choice(calls)()


class Closing(list):
    """Branches that are closed at the end of a block."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for branch in self:
            branch.close()


def resident() -> float:
    """MiB of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident memory from /proc")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_soak(tmp_path):
    engine = chat_engine(max_kv_tokens=1200)
    ask, memory, objects = Requests(engine, tmp_path), {}, {}
    numbers = list(range(REQUESTS))
    random.Random(1).shuffle(numbers)
    sample, found = set(random.Random(2).sample(numbers, 50)), {}
    for done, number in enumerate(numbers, 1):
        result = ask(number)
        if number in sample:
            found[number] = result
        del result
        assert engine.check(), f"request {number} ({KINDS[number % len(KINDS)]})"
        stats = engine.stats()
        assert (stats["used_pages"], stats["open_branches"]) == (0, 0), f"request {number} ({KINDS[number % len(KINDS)]})"
        if done % 200 == 0:
            gc.collect()
            memory[done], objects[done] = resident(), len(gc.get_objects())
    print("\nMiB resident:", {done: round(size, 1) for done, size in memory.items()}, "objects:", objects, file=sys.stderr)
    for number in sorted(sample):
        assert Requests(chat_engine(max_kv_tokens=1200), tmp_path)(number) == found[number], KINDS[number % len(KINDS)]
    assert memory[REQUESTS] - memory[200] < 6 and objects[REQUESTS] - objects[200] < 2000
