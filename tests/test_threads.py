"""Cancellation, Ctrl-C at any moment, callbacks in awkward threads, several threads on one engine, and a fork of the process."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from minips import MinipsError, SamplingParams, Synthesizer
from minips.answering import work
from minips.results import TextStream
from minips.turns import HeldSignals
from tests.support import OWNS, PREFIX, U, chat_engine, prompt_ids, tiny_engine

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
ANSWER = SamplingParams(max_tokens=6)


def whole_job(engine, synthesizer, number):
    """One user's requests -> all that came out."""
    owns, params = (
        [prompt_ids(2 + number % 5, number), prompt_ids(4, number + 1)],
        SamplingParams(max_tokens=6, temperature=1.0, seed=number),
    )
    found = [engine.generate(prompt_ids(5 + number, number), params).token_ids]
    with engine.stream(prompt_ids(6, number), params) as stream:
        next(stream, None)
        found.append(engine.score(prompt_ids(4, number), prompt_ids(3, number)).greedy)
    with engine.prefill(prompt_ids(7, number)) as prefix:
        branches = engine.decode(engine.fork(prefix, owns), params, on_token=lambda *_: engine.stats())
        found.append([branch.output_ids for branch in branches])
        with synthesizer.merge(branches, consume=number % 2 == 0) as context:
            found += [synthesizer.generate(context=context, prompt=U, params=ANSWER).token_ids for _ in range(2)]
        for branch in branches:
            branch.close()
    found.append(synthesizer.run(prompt_ids(3, number), owns, U, worker_params=params, params=ANSWER).token_ids)
    return found


def in_threads(*calls):
    """What each call returned, or the exception that it ended with; fails if one hangs."""
    found = [None] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return found


@pytest.mark.parametrize("count, rounds", [(2, 3), (8, 1)])
def test_threads_get_what_they_would_get_alone(count, rounds):
    numbers = range(count)
    expected = [whole_job(engine := tiny_engine(), Synthesizer(engine), number) for number in numbers]
    engine = tiny_engine(max_kv_tokens=4000)
    synthesizer = Synthesizer(engine)
    for _ in range(rounds):
        assert in_threads(*[lambda number=number: whole_job(engine, synthesizer, number) for number in numbers]) == expected
        assert engine.check() and engine.stats()["used_pages"] == 0 == engine.stats()["open_branches"]


def test_a_stream_lets_other_threads_compute_in_between():
    engine = tiny_engine()
    seen = []

    def read():
        for _ in engine.generate_batch([prompt_ids(4)], SamplingParams(max_tokens=200)):
            seen.append("stream")

    def ask():
        time.sleep(0.02)
        for _ in range(3):
            engine.generate(prompt_ids(5), SamplingParams(max_tokens=1))
        seen.append("asked")

    assert in_threads(read, ask) == [None, None] and seen == ["asked", "stream"]


def test_one_branch_is_decoded_by_one_thread_at_a_time():
    engine = tiny_engine()
    for _ in range(5):
        branch, start = engine.prefill(PREFIX), threading.Barrier(4)
        found = in_threads(*[lambda: start.wait() < 9 and engine.decode([branch], PARAMS)] * 4)
        done = sum(result == [branch] for result in found)
        assert 1 <= done and all(result == [branch] or "being decoded just now" in str(result) for result in found)
        assert branch.num_cached == branch.num_tokens == len(PREFIX) + 8 * done and engine.check()


def test_closing_a_branch_waits_for_the_turn_of_another_thread():
    """And is refused where that turn began to decode it: the pages of a row must not be anybody else's."""
    engine = tiny_engine()
    expected = engine.decode([engine.prefill(PREFIX)], PARAMS)[0].output_ids
    for half in (False, True):
        branch, found = engine.prefill(PREFIX), []
        closer = threading.Thread(target=lambda: found.extend(in_threads(branch.close)), daemon=True)
        steps = TextStream(work(engine, [branch], [PARAMS], True, True), engine.turns)
        with engine.turns("a test"):
            closer.start()
            time.sleep(0.05)
            if half:
                next(steps, None)
            else:
                engine.decode([branch], PARAMS)
        closer.join(20)
        if half:
            assert "cannot be closed while it is being decoded" in str(found[0]) and not branch.closed
            for _ in steps:
                pass
        else:
            assert found == [None] and branch.closed and not branch.segments
        assert branch.output_ids == expected and engine.check()


def test_a_callback_may_wait_for_another_thread_that_uses_the_engine():
    engine = tiny_engine()
    branches = engine.fork(engine.prefill(PREFIX), OWNS)
    expected = engine.generate(PREFIX, ANSWER).token_ids
    found = []

    def callback(row, token, text):
        if len(found) < 2:
            found.extend(in_threads(lambda: engine.generate(PREFIX, ANSWER).token_ids, lambda: engine.decode(branches[:1], PARAMS)))

    engine.decode(branches, PARAMS, on_token=callback)
    assert found[0] == expected and isinstance(found[1], MinipsError) and "being decoded just now" in str(found[1])
    assert [b.output_ids for b in branches] == [b.output_ids for b in engine.decode(engine.fork(engine.prefill(PREFIX), OWNS), PARAMS)]
    assert engine.check()


def test_a_callback_may_use_the_engine_itself():
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    branches = engine.fork(engine.prefill(PREFIX), OWNS)
    inner = []
    engine.decode(branches, PARAMS, on_token=lambda *_: inner.append(whole_job(engine, synthesizer, 2)) if not inner else None)
    assert inner == [whole_job(engine, synthesizer, 2)] and engine.check()


@pytest.mark.parametrize("after", range(4))
def test_a_stream_dropped_or_closed_at_any_point_gives_its_pages_back(after):
    engine = chat_engine()  # its tokens have text
    synthesizer = Synthesizer(engine)
    for way in ("close", "drop", "another thread"):
        for make in (
            lambda: engine.stream(PREFIX, ANSWER),
            lambda: synthesizer.stream_from_caches(engine.decode(engine.fork(engine.prefill(PREFIX), OWNS), PARAMS), U, ANSWER),
        ):
            stream = make()
            for _ in range(after):
                next(stream, None)
            if way == "drop":
                del stream
            else:
                in_threads(stream.close) if way == "another thread" else stream.close()
                assert next(stream, "end") == "end"
                with pytest.raises(MinipsError, match="before the stream was read to its end"):
                    stream.result
                del stream
            assert engine.check() and engine.stats()["used_pages"] == 0


# Ctrl-C


def requests(engine, synthesizer):
    """A mixture of requests, without a branch left open."""
    with engine.prefill(PREFIX) as prefix, contextlib.ExitStack() as stack:
        branches = engine.fork(prefix, OWNS)
        for branch in branches:
            stack.callback(branch.close)
        engine.decode(branches, PARAMS, on_token=lambda *_: None)
        found = [branch.output_ids for branch in branches]
        for _ in engine.stream(PREFIX, ANSWER):
            pass
        return found, synthesizer.generate_from_caches(branches, U, ANSWER).token_ids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM], ids=["SIGINT", "SIGALRM"])
def test_a_signal_at_any_moment_leaves_no_page_behind(number):
    def interrupt(*_):
        raise KeyboardInterrupt

    engine, rng = tiny_engine(), random.Random(7)
    synthesizer = Synthesizer(engine)
    expected = requests(engine, synthesizer)
    started = time.perf_counter()
    requests(engine, synthesizer)
    length = time.perf_counter() - started
    old, timer = signal.signal(number, interrupt), threading.Event()
    interrupted = 0
    try:
        for _ in range(30):
            timer.clear()
            delay = rng.uniform(0, length)
            killer = threading.Timer(delay, lambda: None if timer.is_set() else os.kill(os.getpid(), number))
            try:
                if number == signal.SIGALRM:
                    signal.setitimer(signal.ITIMER_REAL, delay + 1e-6)
                else:
                    killer.start()
                found = requests(engine, synthesizer)
                assert found == expected
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                with HeldSignals() as held:  # what comes late is not meant for what follows
                    timer.set()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    if killer.is_alive():
                        killer.join()
                    held.waiting.clear()
            assert engine.check() and engine.stats()["used_pages"] == 0 == engine.stats()["open_branches"]
    finally:
        signal.signal(number, old)
    assert interrupted > 8 and requests(engine, synthesizer) == expected
    assert signal.getsignal(number) == old


def test_ctrl_c_takes_effect_between_two_forward_passes():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests of random signals have left
    engine = tiny_engine(prefill_chunk=16)
    attention, passes = engine.model.model.layers[0].self_attn, []
    plain = attention.forward

    def forward(*arguments):
        passes.append(1)
        if len(passes) == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(*arguments)

    attention.forward = forward
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(prompt_ids(100))
    assert len(passes) == 2 and engine.check() and engine.stats()["used_pages"] == 0
    branches = engine.fork(engine.prefill(PREFIX), OWNS)
    before, passes[:] = [list(b.token_ids) for b in branches], []
    with pytest.raises(KeyboardInterrupt):
        engine.decode(branches, PARAMS)
    assert [b.token_ids for b in branches] == before and len(passes) == 2 and engine.check()
    assert engine.decode(branches, PARAMS)[0].output_ids and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_closes_the_stream_it_interrupts():
    """Between two steps that works; within one, where a chunk of the prompt is done, it is one clear error that ends the stream."""
    engine = tiny_engine(prefill_chunk=16)
    attention = engine.model.model.layers[0].self_attn
    plain, passes = attention.forward, []

    def forward(*arguments):
        passes.append(1)
        if len(passes) == when:
            signal.raise_signal(signal.SIGALRM)
        return plain(*arguments)

    attention.forward = forward
    old = signal.signal(signal.SIGALRM, lambda *_: stream.close())
    try:
        for when, count, ending in (
            (2, 100, pytest.raises(MinipsError, match="closed within its own step")),
            (2, 10, contextlib.nullcontext()),
        ):
            stream = engine.stream(prompt_ids(count), SamplingParams(max_tokens=50))
            passes.clear()
            with ending:
                assert list(stream) == []
            assert len(passes) == 2 and engine.check() and engine.stats()["used_pages"] == 0
    finally:
        signal.signal(signal.SIGALRM, old)


def test_handlers_come_back_and_run_once():
    seen = []
    old = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with HeldSignals(), HeldSignals():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        with HeldSignals():
            signal.signal(signal.SIGINT, lambda number, frame: seen.append("new"))
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT, "new"]
    finally:
        signal.signal(signal.SIGINT, old)


# Processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_and_does_not_hang():
    """Also where another thread was computing at the moment of the fork, so that its turn never ends in the child."""
    engine = chat_engine()
    synthesizer = Synthesizer(engine)
    branch, stream = engine.prefill(PREFIX), engine.stream(PREFIX, ANSWER)
    next(stream)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with engine.turns("a test"):
            inside.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            refused = 0
            for call in (
                lambda: engine.generate([1], ANSWER),
                lambda: engine.decode([branch], ANSWER),
                lambda: next(stream),
                lambda: engine.stats(),
                lambda: synthesizer.generate_from_caches([branch], U, ANSWER),
            ):
                try:
                    call()
                except MinipsError as error:
                    refused += "cannot be used in a fork of it" in str(error)
            branch.close()
            del stream
            code = 0 if refused == 5 else 2
        os._exit(code)
    deadline = time.monotonic() + 20
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    leave.set()
    holder.join()
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status[1]) == 0
    assert stream.finish().token_ids == engine.generate(PREFIX, ANSWER).token_ids
    branch.close()
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_a_callback_that_is_none_is_one_line():
    engine = tiny_engine()
    with engine.prefill(prompt_ids(5)) as root, pytest.raises(MinipsError, match="on_token is int, expected a function"):
        engine.decode([root], on_token=5)
