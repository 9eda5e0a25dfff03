"""Rows of a run on disk: nothing lost and nothing twice after kills at any moment, one writer, no mixing of runs; and the statistics."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minips.errors import MinipsError
from minips.evaluation import records
from minips.evaluation.records import open_records, read_rows
from minips.evaluation.statistics import bonett_price, bootstrap, difference, estimate, wilson

ARGUMENTS = {"task": "squad", "rows": 30, "data": Path("somewhere"), "methods": ("text", "parallel")}


def row_of(number, m=4, **more):
    method = {"text": f"answer\n{number} | \u2028 \ud800 é", "scores": {"em": 1.0}, "nll": 0.5}
    return {"task": "squad", "id": str(number), "m": m, "methods": {"text": method}, **more}


CHILD = """
import sys
from minips.evaluation.records import open_records
with open_records(sys.argv[1], {"rows": 90}) as records:
    print("open", flush=True)
    for number in range(90):
        if ("t", str(number), 4) not in records.done:
            filler = "x" * (1_500_000 if number % 6 == 0 else number * 100)
            records.append({"task": "t", "id": str(number), "m": 4, "methods": {}, "filler": filler})
            print(number, flush=True)
"""


def start_child(folder):
    root = Path(__file__).parent.parent
    return subprocess.Popen([sys.executable, "-c", CHILD, folder], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_kills_at_random_moments_lose_nothing_and_repeat_nothing(tmp_path):
    rng, acknowledged, kills = random.Random(5), [], 0
    for _ in range(200):
        child = start_child(tmp_path)
        assert child.stdout.readline() == b"open\n", child.stderr.read()
        for _ in range(rng.randrange(20)):
            acknowledged += map(int, child.stdout.readline().split())
        time.sleep(rng.uniform(0, 0.003))
        child.kill()
        out, err = child.communicate()
        acknowledged += [int(line) for line in out.split(b"\n")[:-1]]
        kills += child.returncode == -signal.SIGKILL
        found = [row["id"] for row in read_rows(tmp_path)]
        assert len(set(found)) == len(found) and set(map(str, acknowledged)) <= set(found)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, err
    assert kills >= 4 and found == [str(number) for number in range(90)]
    assert len(acknowledged) == len(set(acknowledged))
    assert all(len(row["filler"]) == 1_500_000 for row in read_rows(tmp_path)[::6])


def test_a_line_cut_short_at_any_byte_is_removed_on_resume(tmp_path):
    with open_records(tmp_path, ARGUMENTS) as run:
        for number in range(3):
            run.append(row_of(number))
    path = tmp_path / "preds.jsonl"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for size in range(start, len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = 3 if size >= len(whole) - 1 else 2  # only the newline missing: the row is whole
        assert len(read_rows(tmp_path)) == kept and path.stat().st_size == size  # reading changes nothing
        with open_records(tmp_path, ARGUMENTS) as run:
            assert run.done == {("squad", str(number), 4) for number in range(kept)}
            if kept == 2:
                run.append(row_of(2))
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 100)  # what some file systems leave after a power cut
    open_records(tmp_path, ARGUMENTS).close()
    assert path.read_bytes() == whole


def test_rows_come_back_as_they_were(tmp_path):
    with open_records(tmp_path, ARGUMENTS) as run:
        run.append(row_of(1))
        run.append(row_of(1, m=8))  # the same example with other workers is another row
        assert run.rows() == [row_of(1), row_of(1, m=8)] == read_rows(tmp_path)
        with pytest.raises(MinipsError, match="is there already"):
            run.append(row_of(1))
    assert (tmp_path / "preds.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("broken, said", [
    (b'{"task": "squ\n', "line 2 is broken: is not JSON"),
    (b"\n", "line 2 is broken"),
    (b"[" * 100_000 + b"\n", "line 2 is broken"),
    (b"[1]\n", "line 2 is broken: expected an object, found list"),
    (b'{"task": "t", "id": "7", "m": true, "methods": {}}\n', "m is True, expected an integer"),
    (b'{"task": "t", "id": 7, "m": 1, "methods": {}}\n', "id is 7, expected a string"),
    (b'{"task": "t", "id": "7", "m": 1, "methods": {"text": 3}}\n', "methods is .*, expected an object of objects"),
    (json.dumps(row_of(0)).encode() + b"\n", "line 2 is broken: row .* stands in line 1 already"),
])  # fmt: skip
def test_a_line_broken_in_the_middle_is_refused_and_left_alone(tmp_path, broken, said):
    with open_records(tmp_path, ARGUMENTS) as run:
        run.append(row_of(0))
    path = tmp_path / "preds.jsonl"
    path.write_bytes(content := path.read_bytes() + broken + json.dumps(row_of(2)).encode() + b"\n")
    with pytest.raises(MinipsError, match=said) as caught:
        open_records(tmp_path, ARGUMENTS)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_resume_with_other_arguments_names_the_difference(tmp_path):
    open_records(tmp_path, ARGUMENTS).close()
    before = (tmp_path / "run.json").read_bytes()
    assert {"arguments", "versions", "machine", "started"} == set(json.loads(before))
    with pytest.raises(MinipsError, match="rows is 50, was 30; seed is 1, was not given"):
        open_records(tmp_path, {**ARGUMENTS, "rows": 50, "seed": 1})
    with pytest.raises(MinipsError, match="data is not given, was 'somewhere'"):
        open_records(tmp_path, {name: value for name, value in ARGUMENTS.items() if name != "data"})
    open_records(tmp_path, ARGUMENTS).close()  # the refusals hold no lock
    assert (tmp_path / "run.json").read_bytes() == before
    (tmp_path / "run.json").write_text('{"arguments": 3}')
    with pytest.raises(MinipsError, match="run.json: arguments is 3, expected an object"):
        open_records(tmp_path, ARGUMENTS)


def test_rows_without_their_run_are_refused(tmp_path):
    (tmp_path / "preds.jsonl").write_text(json.dumps(row_of(0)) + "\n")
    with pytest.raises(MinipsError, match="run.json, which says how they were made, is missing"):
        open_records(tmp_path, ARGUMENTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(MinipsError, match="cannot be written"):
        open_records(tmp_path / "file", ARGUMENTS)


def test_two_writers_are_refused(tmp_path):
    with open_records(tmp_path, ARGUMENTS) as run:
        run.append(row_of(0))
        with pytest.raises(MinipsError, match="another process is writing"):
            open_records(tmp_path, ARGUMENTS)
        read_rows(tmp_path)
        child = start_child(tmp_path)
        assert b"another process is writing" in child.communicate()[1] and child.returncode == 1
        run.append(row_of(1))
    open_records(tmp_path, ARGUMENTS).close()


def test_a_failed_write_leaves_no_half_line(tmp_path, monkeypatch):
    with open_records(tmp_path, ARGUMENTS) as run:
        run.append(row_of(0))
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(records.os, "write", lambda file, data: write(file, data[:9]))  # what a full disk does
            with pytest.raises(MinipsError, match="row not written .no space"):
                run.append(row_of(1))
        assert run.done == {("squad", "0", 4)}
        run.append(row_of(1))
        assert run.rows() == [row_of(0), row_of(1)]
        with pytest.raises(MinipsError, match="not a finite number"):
            run.append(row_of(2, nll=float("nan")))
        with pytest.raises(MinipsError, match="task is None, expected a string"):
            run.append({"id": "3"})
    assert len(read_rows(tmp_path)) == 2


def covered(intervals, truth):
    return np.mean([low <= truth <= high for low, high in intervals])


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    for n, rate in ((10, 0.3), (50, 0.05), (200, 0.4)):
        assert 0.91 < covered([wilson(int(right), n) for right in rng.binomial(n, rate, 2000)], rate) < 0.99
    for n, (up, down) in ((20, (0.1, 0.3)), (200, (0.1, 0.05))):
        counts = rng.multinomial(n, [up, down, 1 - up - down], 2000)
        assert 0.93 < covered([bonett_price(int(a), int(b), n) for a, b, _ in counts], up - down) <= 1
    assert 0.92 < covered([bootstrap(rng.exponential(size=150)) for _ in range(400)], 1.0) < 0.98


def test_estimates_say_what_the_data_say():
    assert wilson(5, 10) == pytest.approx((0.23659309, 0.76340691))  # of the usual tables
    assert wilson(0, 20) == pytest.approx((0, 0.1611252)) and wilson(20, 20)[1] == 1.0
    right = estimate([1.0, 1.0, 1.0])
    assert (right.mean, right.high, right.kind) == (1.0, 1.0, "wilson") and 0.4 < right.low < 0.5  # three of three prove little
    assert estimate([]) is None and difference([], []) is None
    for values in ([2.5], [0.1 + 0.2, 0.3], [0.5] * 40):
        assert (estimate(values).low, estimate(values).high, estimate(values).kind) == (None, None, "none")
    values = np.random.default_rng(1).normal(3, 1, 800)
    found = estimate(values)
    assert found == estimate(list(values)) != estimate(values, seed=1) and found.kind == "bootstrap"
    half = 1.96 * values.std() / 800**0.5
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 10)
    with pytest.raises(ValueError, match="finite"):
        estimate([1.0, float("nan")])


def test_paired_differences():
    rng = np.random.default_rng(2)
    base = rng.normal(3, 2, 300)
    better = base - 0.1 + rng.normal(0, 0.1, 300)
    found = difference(better, base)  # far narrower than either mean's own interval
    assert found.high < 0 and 6 * (found.high - found.low) < estimate(base).high - estimate(base).low
    assert found.higher + found.lower == 300 and found.lower > 200
    same = difference([1.0, 0.0] * 20, [1.0, 0.0] * 20)  # never differing in 40 rows is no proof of equality
    assert same.mean == 0 and same.low == -same.high < -0.05 and (same.higher, same.lower) == (0, 0)
    one = difference([1, 1, 0, 0], [1, 0, 0, 0])
    assert (one.mean, one.n, one.higher, one.lower, one.kind) == (0.25, 4, 1, 0, "bonett-price")
    assert difference([0.5], [0.25]).low is None
    with pytest.raises(ValueError, match="not paired"):
        difference([1.0], [])
