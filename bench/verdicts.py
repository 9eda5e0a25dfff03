"""What the speed benches measured, set against what was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from decode import rate
from divergence import KL_MARK, TOP1_MARK
from measure import warm
from ttft import median

TTFT_MARKS = {512: 10.9, 1024: 19, 2048: 33, 4096: 60}  # 80% of the limits with m = 4, |u| = 128
PASS_MARK, MEMORY_MARK, SCALING_MARK, END_TO_END_MARK = 0.10, 0.05, 3, 2.5
BF16_MARKS, INT4_MARKS = {1: 1.5, 4: 1.3, 8: 1.3}, {1: 2.5, 4: 2}
DECODE_MARKS = {"decode": BF16_MARKS, "decode-compiled": BF16_MARKS, "decode-int4": INT4_MARKS, "decode-int4-compiled": INT4_MARKS}


def row(what: str, value: float, mark: float, form: str = "{:.2f}", most: bool = False) -> list[str]:
    held = value <= mark if most else value >= mark
    sign = "at most" if most else "at least"
    return [what, form.format(value), f"{sign} {form.format(mark)}", "yes" if held else "NO"]


def verdicts(found: dict[str, dict]) -> list[list[str]]:
    """Rows (what, measured, mark, held) of all that the steps in `found` can tell."""
    return [*ttft_rows(found), *decode_rows(found), *other_rows(found)]


def ttft_rows(found: dict[str, dict]) -> Iterator[list[str]]:
    for name in ("ttft", "ttft-2048", "ttft-4096", "ttft-compiled"):
        how = ", compiled" * name.endswith("compiled")
        for case in found.get(name, {}).get("cases", ()):
            marked = (case["m"], case["u"]) == (4, 128) and case["length"] in TTFT_MARKS and "parallel" in case["methods"]
            if marked and "text" in case["methods"]:
                gain = median(case, "text") / median(case, "parallel")
                yield row(
                    f"TTFT text / parallel{how}, 4 x {case['length']} (limit {case['limit']:.1f})", gain, TTFT_MARKS[case["length"]], "{:.1f}"
                )
            if {"text", "transformers"} <= set(case["methods"]):
                ahead = median(case, "transformers") / median(case, "text")
                yield row(f"TTFT transformers / text, {case['m']} x {case['length']}", ahead, 1)
            if marked and "transformers" in case["methods"]:
                gain = median(case, "transformers") / median(case, "parallel")
                yield row(f"TTFT of the same text in transformers / parallel, 4 x {case['length']}", gain, TTFT_MARKS[case["length"]], "{:.1f}")
    yield from pass_rows(found, "", ("ttft", "ttft-2048", "ttft-4096", "mappers", "ttft-m", "ttft-growth"))
    yield from pass_rows(found, ", compiled", ("ttft-compiled", "mappers-compiled"))


def pass_rows(found: dict[str, dict], how: str, names: tuple[str, ...]) -> Iterator[list[str]]:
    shares = [
        (statistics.median((turn["rerotate"] + turn["map"]) / turn["ttft"] for turn in one["warm"]), method, case)
        for name in names
        for case in found.get(name, {}).get("cases", ())
        for method, one in case["methods"].items()
        if case["u"] >= 128 and case["m"] == 4 and (method.startswith("parallel") or method == "official")
    ]
    if shares:
        share, method, case = max(shares, key=lambda entry: entry[0])
        where = f"{method}, {case['m']} x {case['length']}, u {case['u']}"
        yield row(f"re-rotate + map in TTFT{how}, m = 4, the largest ({where})", share, PASS_MARK, "{:.1%}", most=True)


def decode_rows(found: dict[str, dict]) -> Iterator[list[str]]:
    for name, marks in DECODE_MARKS.items():
        weights = ("int4" if "int4" in name else "bf16") + ", compiled" * name.endswith("compiled")
        for case in found.get(name, {}).get("cases", ()):
            if case["m"] in marks and "transformers" in case["methods"]:
                gain = rate(case, "minips") / rate(case, "transformers")
                yield row(f"decode {weights}, ours / transformers, m = {case['m']}", gain, marks[case["m"]])
    for name, how in (("decode", "bf16"), ("decode-compiled", "bf16, compiled")):
        rates = {case["m"]: {method: rate(case, method) for method in case["methods"]} for case in found.get(name, {}).get("cases", ())}
        if {1, 4} <= set(rates):
            yield row(f"decode {how}, m = 4 / the fastest m = 1", rates[4]["minips"] / max(rates[1].values()), SCALING_MARK)
    for case in found.get("decode", {}).get("prefill", ()):
        if "transformers" in case["methods"]:
            seconds = {name: warm(one, "prefill")["median"] for name, one in case["methods"].items()}
            yield row(f"prefill, ours / transformers, {case['length']} tokens", seconds["transformers"] / seconds["minips"], 1)


def other_rows(found: dict[str, dict]) -> Iterator[list[str]]:
    if data := found.get("int4"):
        yield row(f"int4, mean KL to bf16, {data['positions']} positions", data["kl_mean"], KL_MARK, "{:.3f}", most=True)
        yield row("int4, top-1 agreement with bf16", data["top1"], TOP1_MARK, "{:.1%}")
    for case in found.get("end-to-end", {}).get("cases", ()):
        whole = {name: warm(one, "whole")["median"] for name, one in case["methods"].items()}
        yield row(f"end to end, sequential + text / parallel, m = {case['m']}", whole["sequential"] / whole["parallel"], END_TO_END_MARK)
    for name, how in (("memory", ""), ("memory-compiled", ", compiled")):
        if cases := found.get(name, {}).get("cases"):
            worst = max(cases, key=lambda case: case["peak"] / case["pages"])
            where = f"{worst['mapper']}, {worst['m']} x {worst['length']}"
            yield row(f"extra memory of the merge{how}, the largest ({where})", worst["peak"] / worst["pages"], MEMORY_MARK, "{:.1%}", most=True)
    if data := found.get("decode-growth"):
        for what in ("pool", "page"):
            steps = [warm(one, "step")["median"] for one in data["growth"][what].values()]
            yield row(f"decode step, slowest / fastest {what} size", max(steps) / min(steps), 1.1, most=True)
