"""Figures, report and plots of a run folder, with rows made by a seeded generator."""

import json
import math
import os
import random
import re
import sys
from html.parser import HTMLParser

import pytest

from minips.errors import MinipsError
from minips.evaluation.methods import METHODS as EVERY_METHOD
from minips.evaluation.plots import PLOTS, _look, write_plots
from minips.evaluation.records import open_records
from minips.evaluation.report import write_report
from minips.evaluation.samples import samples
from minips.evaluation.summary import summarise

METHODS = ("parallel", "text", "naive")
NASTY = "</pre><script>alert(1)</script> ````\n| a | b |\n# c \\ * _x_ $y$ [l](u) &lt; \x1b[2J\x00\u202e\ud800\x85\r\u2028end"


def entry(right, nll, **more):
    costs = {"answer_tokens": 5, "prefilled_tokens": 30, "reused_tokens": 200, "seconds": 0.5, "target_tokens": 4}
    scores = {"em": float(right), "f1": right if right in (0, 1) else 0.5}
    return {
        "text": "Paris",
        "extracted": "Paris",
        "scores": scores,
        "nll": nll,
        "finish_reason": "stop",
        "branch_tokens": [60, 80],
        **costs,
        **more,
    }


def row_of(number, methods, task="squad", m=4, **more):
    workers = [{"text": f"finding {at}", "tokens": 50 + 10 * at, "finish_reason": "stop", "extracted": None} for at in range(m)]
    head = {"task": task, "id": str(number), "m": m, "question": f"question {number}", "group": "easy", "references": ["Paris"]}
    return {**head, "workers": workers, "methods": methods, "seconds": {"workers": 1.0, "methods": 3.0}, **more}


def made(count, tasks=("squad", "arc"), sizes=(4,), seed=0):
    """Rows of which parallel is right a little more often than text, and naive far less."""
    rng = random.Random(seed)
    for task in tasks:
        for m in sizes:
            for number in range(count):
                hard = rng.gauss(0, 1)
                methods = {
                    name: entry(rng.random() < 1 / (1 + math.exp(hard + shift)), 3 + hard + shift + rng.gauss(0, 0.2))
                    for name, shift in zip(METHODS, (-0.3, 0.0, 2.0))
                }
                yield row_of(number, methods, task, m, group=rng.choice(("easy", "hard")))


def fill(folder, rows):
    with open_records(folder, {"tasks": ["squad"], "methods": list(METHODS), "adapter": None}) as records:
        for row in rows:
            records.append(row)
    return folder


def add_measurements(folder, layers=6):
    rng = random.Random(1)
    sweep, attention = [], []
    for m in (1, 2, 4):
        for method, slope in (("parallel", 0.1), ("text", 1.0)):
            for length in (128, 512) if m == 4 else (128,):
                seconds = 0.05 + 0.001 * slope * m * length
                ttft = {"median": seconds, "p95": 1.3 * seconds, "n": 5}
                sweep.append(
                    {"m": m, "branch_tokens": length, "method": method, "ttft": ttft, "end_to_end": 1.0 + seconds, "peak_mb": 900.0}
                )
        branches = [[rng.uniform(0.05, 0.1) for _ in range(m)] for _ in range(layers)]
        shares = {"prefix": [0.5] * layers, "self": [0.5 - sum(layer) for layer in branches], "branches": branches}
        attention.append({"m": m, **shares, "entropy": [0.97 * math.log(m)] * layers, "max_entropy": math.log(m)})
    (folder / "sweep.json").write_text(json.dumps(sweep))
    (folder / "attention.json").write_text(json.dumps({"model": "small", "sweep": attention}))
    case = {"m": 2, "rows": 4, "positions": 90, "kl_mean": 0.61, "kl_max": 2.0, "top1": 0.75, "mark": 0.5, "passed": False}
    (folder / "self_check.json").write_text(json.dumps({"model": "small", "adapter": None, "cases": [case]}))


def test_figures_of_a_handful_of_rows():
    rows = [
        row_of(0, {"text": entry(0, 3.0), "parallel": entry(1, 2.0, finish_reason="length")}),
        row_of(1, {"text": entry(1, 1.0), "parallel": entry(1, 1.5)}),
        row_of(2, {"text": entry(0, None, extracted=None), "parallel": entry(0, 4.0)}),
        row_of(3, {"parallel": entry(1, 9.0, answer_tokens=9)}),  # text did not answer this one
        row_of(4, {name: entry(0, None, finish_reason="error") for name in ("text", "parallel")}, error="too long", workers=[]),
    ]
    table = summarise(rows)["tables"][0]
    assert (table["task"], table["m"], table["rows"], table["errors"], table["metrics"]) == ("squad", 4, 5, 1, ["em", "f1"])
    assert table["seconds"] == {"workers": 5.0, "methods": 15.0}
    assert table["workers"] == {"number": 4.0, "tokens": 65.0, "longest": 80, "finish_reasons": {"stop": 16}}
    parallel, text = table["methods"]["parallel"], table["methods"]["text"]
    assert (parallel["rows"], parallel["scores"]["em"]["mean"], parallel["scores"]["em"]["kind"]) == (5, 0.6, "wilson")
    assert (parallel["nll"]["n"], parallel["nll"]["mean"], parallel["nll"]["low"]) == (4, 4.125, None)  # too few for a bootstrap
    change = parallel["differences"]
    assert (change["em"]["n"], change["em"]["mean"], change["em"]["higher"], change["em"]["lower"]) == (4, 0.25, 1, 0)
    assert (change["nll"]["n"], change["nll"]["mean"]) == (2, -0.25)  # the rows where both have one
    assert "differences" not in text and text["nll"]["mean"] == 2.0 and text["no_answer"] == 1
    assert parallel["finish_reasons"] == {"stop": 3, "length": 1, "error": 1} and parallel["answer_tokens"] == 29 / 5
    assert table["failures"]["parallel"]["by_group"] == {"easy": {"n": 5, "metric": 0.6}}


def test_tables_keep_tasks_together_and_sizes_in_order():
    rows = [row_of(0, {"text": entry(1, 1.0)}, task, m) for m in (8, 1, 2) for task in ("b", "a")]
    assert [(table["task"], table["m"]) for table in summarise(rows)["tables"]] == [
        ("b", 1),
        ("b", 2),
        ("b", 8),
        ("a", 1),
        ("a", 2),
        ("a", 8),
    ]
    assert summarise([])["tables"] == []


def test_a_clear_difference_is_found_and_a_missing_baseline_gives_none():
    rows = list(made(150))
    for table in summarise(rows)["tables"]:
        naive = table["methods"]["naive"]["differences"]
        assert naive["em"]["high"] < 0 < naive["nll"]["low"] and naive["nll"]["kind"] == "bootstrap"
        assert 1.8 < naive["nll"]["mean"] < 2.2
    assert json.dumps(summarise(rows)) == json.dumps(summarise(rows))
    assert all(not method["differences"] for table in summarise(rows, "nobody")["tables"] for method in table["methods"].values())


class Page(HTMLParser):
    """Tags must close in order; those seen are collected."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


KNOWN_TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "thead", "tbody", "tr", "th", "td", "strong",
    "details", "summary", "pre", "img",
}  # fmt: skip


def test_nothing_that_a_model_writes_gets_out_of_its_place(tmp_path):
    names = ("text", NASTY)
    methods = {name: entry(at, 1.0, text=NASTY, extracted=NASTY, finish_reason=NASTY) for at, name in enumerate(names)}
    row = row_of(NASTY, methods, task=NASTY, group=NASTY, question=NASTY, references=[NASTY])
    row["workers"][0] |= {"text": NASTY, "finish_reason": NASTY}
    fill(tmp_path, [row, {**row, "id": "other", "group": "g", "error": NASTY}])
    case = {"name": NASTY, "m": 2, "rows": 4, "positions": 90, "kl_mean": 0.6, "kl_max": 2, "top1": 1, "mark": 0.5, "bound": NASTY}
    check = {"model": NASTY, "adapter": NASTY, "cases": [{**case, "passed": True}]}
    (tmp_path / "self_check.json").write_text(json.dumps(check))
    _, markdown, html = (path.read_text(encoding="utf-8") for path in write_report(tmp_path))
    for text in (markdown, html):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", text) and "␛[2J" in text
    page = Page()
    page.feed(html)
    assert page.open == [] and page.seen <= KNOWN_TAGS and "<script" not in html
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)  # code blocks, which no text may close early
    assert "alert" in outside and markdown.count("\n`````text\n") >= 6
    assert not re.search(r"(?<!\\)[<>&$\[]", re.sub(r"^!\[.*\]\(\w+\.png\)$", "", outside, flags=re.MULTILINE))
    sizes = None
    for line in outside.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert cells is None or sizes in (None, cells), line
        sizes = cells


def test_report_of_a_whole_run(tmp_path):
    fill(tmp_path, made(40, sizes=(2, 4)))
    add_measurements(tmp_path)
    summary, markdown, html = write_report(tmp_path)
    figures, text = json.loads(summary.read_text()), markdown.read_text()
    assert figures["run"]["arguments"]["methods"] == list(METHODS) and len(figures["tables"]) == 4
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings == [
        "Overview", "squad, m = 2", "squad, m = 4", "arc, m = 2", "arc, m = 4", "squad as m grows", "arc as m grows",
        "Time and memory, measured here", "Attention shares", "Self-check", "Published, not measured here", "Worked samples",
    ]  # fmt: skip
    assert re.findall(r"<h2>(.*)</h2>", html.read_text()) == headings
    parallel = figures["tables"][0]["methods"]["parallel"]["scores"]["em"]
    assert f"| parallel | {100 * parallel['mean']:.1f} ({100 * parallel['low']:.1f} to {100 * parallel['high']:.1f}) |" in text
    assert "| 512 | 2.5 | 8.23 |" in text and "| 1,024 | 4.8 | – |" in text  # (0.05 + 2.048) / (0.05 + 0.2048)
    assert re.search(r"\| m = 2 \| 2 \| 4 \| 90 \| 6.10e-01 \|.* at most 5e-01 \| \*\*failed\*\* \|", text)
    assert re.search(r"\| 4 \| 50\.0 \| .* \| 0\.970 \|", text) and "| 1 | 50.0 |" in text
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    again = {path: path.read_bytes() for path in (summary, markdown, html)}
    write_report(tmp_path)
    assert again == {path: path.read_bytes() for path in again}


def test_report_without_rows_or_without_anything(tmp_path):
    with pytest.raises(MinipsError, match="nothing to report; expected rows in preds.jsonl"):
        write_report(tmp_path)
    assert os.listdir(tmp_path) == []
    (tmp_path / "sweep.json").write_text("[]")  # nothing fitted
    with pytest.raises(MinipsError, match="nothing to report"):
        write_report(tmp_path)
    add_measurements(tmp_path)
    text = write_report(tmp_path)[1].read_text()
    assert "## Attention shares" in text and "## Overview" not in text and "Worked samples" not in text


@pytest.mark.parametrize("name, change, said", [
    ("sweep.json", lambda data: data[1].pop("m"), r"the file\[1\].m is None, expected an integer"),
    ("sweep.json", lambda data: data[0]["ttft"].pop("median"), r"\[0\].ttft is .*expected an object with a number as median"),
    ("self_check.json", lambda data: data.pop("cases"), "cases is None, expected a list"),
    ("attention.json", lambda data: data["sweep"][2]["branches"][1].append("x"), r"sweep\[2\].branches is .*expected lists of numbers"),
    ("attention.json", lambda data: data["sweep"][2]["branches"][1].append(0.1), r"sweep\[2\] has different numbers"),
    ("attention.json", lambda data: data["sweep"][0]["prefix"].pop(), r"sweep\[0\] has different numbers of layers"),
    ("self_check.json", lambda data: data["cases"][0].update(passed="yes"), r"cases\[0\].passed is 'yes', expected true or false"),
    ("self_check.json", lambda data: data["cases"][0].update(kl_mean=float("nan")), r"kl_mean is nan, expected a number"),
])  # fmt: skip
def test_broken_measurements_are_named(tmp_path, name, change, said):
    add_measurements(tmp_path)
    data = json.loads((tmp_path / name).read_text())
    change(data)
    (tmp_path / name).write_text(json.dumps(data))
    with pytest.raises(MinipsError, match=said) as caught:
        write_report(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and not (tmp_path / "report.md").exists()


def test_samples_are_chosen_by_outcome():
    rows = [
        row_of(number, {"text": entry(a, 1.0), "parallel": entry(b, 1.0)}) for number, (a, b) in enumerate([(0, 0), (1, 1), (1, 1), (0, 1)])
    ]
    rows[1]["methods"]["text"]["text"] = "x" * 5000
    found = samples(rows)[2:]
    titles = [sample.title for sample in found]
    assert titles == [f"squad, row {n}, m = 4: {what}" for n, what in (("3", "methods differ"), ("1", "all right"), ("0", "all wrong"))]
    shown = dict(found[1].parts)
    assert shown["text: right (em 1.00, f1 1.00); answer read: Paris"].endswith("x … (3500 more characters)")
    assert shown["Worker 2: 60 tokens, stop"] == "finding 1" and samples([]) == []


def test_every_method_has_a_look_of_its_own():
    colours = {_look(name, list(EVERY_METHOD))[0] for name in EVERY_METHOD}
    assert len(colours) == len(EVERY_METHOD)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    fill(tmp_path, made(12, tasks=("squad", "_odd $x$ | name"), sizes=(1, 4)))
    add_measurements(tmp_path)
    written = write_plots(tmp_path)
    assert {path.name for path in written} == set(PLOTS)
    for path in written:
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert data.startswith(b"\x89PNG") and 600 < width < 2500 and 300 < height < 2500
    html, text = (path.read_text() for path in write_report(tmp_path)[:0:-1])
    assert html.count("data:image/png;base64,") == len(PLOTS) == text.count("](") and "(methods.png)" in text
    os.utime(tmp_path / "preds.jsonl", ns=(path.stat().st_mtime_ns + 1,) * 2)  # rows came since
    text = write_report(tmp_path)[1].read_text()
    assert "](" not in text and "Plots older than the data were left out" in text
    for name in ("sweep.json", "attention.json"):
        (tmp_path / name).unlink()
    assert [path.name for path in write_plots(tmp_path)] == ["methods.png", "score_by_m.png", "nll_by_m.png"]
    assert not (tmp_path / "attention.png").exists()  # of data that are gone


def test_plots_without_matplotlib(tmp_path, monkeypatch):
    fill(tmp_path, made(2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MinipsError, match="plots need matplotlib, which is not installed"):
        write_plots(tmp_path)
    assert write_report(tmp_path)[2].exists()  # the report does without
