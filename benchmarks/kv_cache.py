"""What the KV cache saves and what it takes: naive loop against cached loop, and memory.

    python -m benchmarks.kv_cache --shape gpt2 --plot kv_cache.png

    tg1 @ dN         one more token after N others: with the cache a forward pass over that token, in the naive loop
                     one over the whole text
    context shift    a text several times as long as the context; its slowest token is the one after a shift, for which
                     half a context is computed again. With "window 128" each token sees the last 128 tokens only

MB are millions of bytes. Memory is that of the bundled model, unless --model or --shape asks for another one.
"""

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np

import minigen
from benchmarks.harness import Report, load_model, name_of, parser, plot, random_ids, ratio, timed

SECONDS = {"quick": 8, "full": 240}
DEPTHS = (16, 64, 128, 192, 256, 512, 1000)
LOOP = 128  # tokens of the prompt, and as many new ones, for which the loops' totals are compared
SAVED_PROMPT = 900


def resident():
    """Resident memory of this process in MB; nan if the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if statm.is_file() else math.nan


def measure_loops(report, model):
    last = model.config.n_positions - 1
    depths = sorted({min(depth, last) for depth in DEPTHS})
    ids = random_ids(model.config, 1, last + 1)
    cases, naive = {}, {}
    for depth in depths:
        cache = model.new_cache(capacity=depth + 1)
        model.forward(ids[:, :depth], cache)

        def cached(cache=cache, depth=depth):
            cache.truncate(depth)
            model.forward(ids[:, depth : depth + 1], cache)

        step = f"tg1 @ d{depth}"
        naive[step] = f"{step}, naive"
        cases[step] = lambda cached=cached: timed(cached, 4)
        cases[naive[step]] = lambda depth=depth: model.forward(ids[:, : depth + 1])
    shallow, *_, deep = naive

    def extra(case, timings):
        if case not in naive:
            return None
        return {
            f"against d{depths[0]}": ratio(timings, case, shallow),
            "ms naive": timings[naive[case]].median,
            "naive min": timings[naive[case]].min,
            "naive / cached": ratio(timings, naive[case], case),
        }

    def shows(timings):
        n_prompt = min(LOOP, (last + 1) // 2)
        after = range(n_prompt - 1, 2 * n_prompt - 1)  # how many tokens come before each one that is run
        without = np.interp(after, depths, [timings[case].median for case in naive.values()])
        with_cache = np.interp(after, depths, [timings[case].median for case in naive])
        gain = without.sum() / (without[0] + with_cache[1:].sum())  # both run the whole prompt first
        return (
            f"For {n_prompt} tokens and {n_prompt} new ones the cached loop is {gain:.1f} times as fast "
            f"(interpolated); a cached step takes {ratio(timings, deep, shallow):.2f} times as long {deep[4:]} as {shallow[4:]}."
        )

    return report.table("One token with and without the cache", cases, shows, extra, idea="KV cache")


def draw(rows, file, title):
    """Milliseconds per token of both loops by depth, on a linear and a logarithmic scale."""
    depths = [int(row["case"].partition("@ d")[2]) for row in rows]
    with plot(file, title, panels=2) as panels:
        for axes, scale in zip(panels, ("linear", "log"), strict=True):
            # The fastest call of each case is the one that other programs disturbed least.
            axes.plot(depths, [row["naive min"] for row in rows], color="0.6", marker="o", label="naive")
            axes.plot(depths, [row["min"] for row in rows], color="C0", marker="o", label="cached")
            axes.set(yscale=scale, xlabel="tokens before this one", ylabel="milliseconds per token, fastest call")
        panels[0].set_ylim(bottom=0)
        panels[0].legend()


def measure_memory(report, model, tokenizer, name):
    n = model.config.n_positions
    n_long = (1 if report.quick else 6) * min(512, n) + 88
    # Case -> tokens and options. The process is larger after each of them, so what takes least comes first.
    asked = {
        "window 128, context shift": (n_long, {"window": min(128, n), "context_shift": True}),
        "one context": (n - 1, {}),
        "context shift": (n_long, {"context_shift": True}),
        "4 texts of one context": (n - 1, {"num_return_sequences": 4}),
    }
    more = {}

    def run(case):
        n_tokens, options = asked[case]
        marks, memory = [], []
        for step in minigen.stream(model, tokenizer, "", seed=1, max_tokens=n_tokens, ignore_eos=True, **options):
            if step.row == 0:
                marks.append(time.perf_counter())
                memory.append(resident())
        seconds, third = np.diff(marks), n_tokens // 3
        more[case] = {
            "tokens": n_tokens,
            "last third / first": float(np.median(seconds[-third:]) / np.median(seconds[:third])),
            "slowest ms": 1000 * float(seconds.max()),
            "MB cache": step.completion.timings.cache_bytes / 1e6,
            "MB process after a third": memory[third],
            "at the end": memory[-1],
        }
        return float(np.mean(seconds))

    def shows(_):
        shifted = [more[case] for case in asked if "shift" in case]
        growth = max(row["at the end"] / row["MB process after a third"] for row in shifted) - 1
        one = more["one context"]["MB cache"]
        return (
            f"Keys and values of {n} tokens take {one:.1f} MB; over {n_long} tokens the process grows by {growth:.1%}."
        )

    title = f"Memory and time per token, for texts from {name}, whose context is {n}"
    cases = {case: lambda case=case: run(case) for case in asked}
    report.table(title, cases, shows, lambda case, _: more[case], once=True, idea="window and context shift")


def main(arguments=None):
    arguments = parser(__doc__, repetitions=5, plot=True).parse_args(arguments)
    report = Report(f"KV cache of {name_of(arguments)}, float32", arguments, SECONDS)
    # First, while the process is small.
    bundled = argparse.Namespace(model=None, shape=None, quick=True)
    asked = arguments if arguments.model or arguments.shape else bundled
    measure_memory(report, *load_model(asked), name_of(asked))
    model, _ = load_model(arguments)
    loops = measure_loops(report, model)
    if arguments.plot:
        draw(loops, arguments.plot, f"{name_of(arguments)}: naive loop against cached loop")


if __name__ == "__main__":
    main()
