"""What the KV cache saves and what it takes: naive loop against cached loop, and memory.

    python -m benchmarks.kv_cache --shape gpt2 --plot kv_cache.png

    tg1 @ dN         one more token after N others: with the cache a forward pass over that token, in the naive loop
                     one over the whole text
    context shift    a text several times as long as the context; its slowest token is the one after a shift, for which
                     half a context is computed again. With "window 128" each token sees the last 128 tokens only

MB are millions of bytes. Memory is that of the bundled model, unless --model or --shape asks for another one.
"""

import math
import os
import time
from pathlib import Path

import numpy as np

import minigen
from benchmarks.harness import Report, checkpoint, load_model, model_of, name_of, parser, random_ids, ratio, timed

SECONDS = {"quick": 3, "full": 90}


def resident():
    """Resident memory of this process in MB; nan if the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if statm.is_file() else math.nan


def measure_loops(report, model):
    last = model.config.n_positions - 1
    depths = sorted({min(depth, last) for depth in (16, 64, 128, 192, 256, 512, 1000)})
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
        n_prompt = min(128, (last + 1) // 2)
        after = range(n_prompt - 1, 2 * n_prompt - 1)  # how many tokens come before each one that is run
        without = np.interp(after, depths, [timings[case].median for case in naive.values()])
        with_cache = np.interp(after, depths, [timings[case].median for case in naive])
        gain = without.sum() / (without[0] + with_cache[1:].sum())  # both run the whole prompt first
        return (
            f"For {n_prompt} tokens and {n_prompt} more, cached is {gain:.1f} times as fast as naive (interpolated). "
            f"A cached step takes {ratio(timings, deep, shallow):.2f} times as long {deep[4:]} as {shallow[4:]}."
        )

    return report.table("One token with and without the cache", cases, shows, extra, idea="KV cache")


def draw(rows, file, title):
    """Milliseconds per token of both loops by depth, on a linear and a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    depths = [int(row["case"].partition("@ d")[2]) for row in rows]
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
    figure.suptitle(title)
    for axes, scale in zip(panels, ("linear", "log"), strict=True):
        # The fastest call of each case is the one that other programs disturbed least.
        axes.plot(depths, [row["naive min"] for row in rows], color="0.6", marker="o", label="naive")
        axes.plot(depths, [row["min"] for row in rows], color="C0", marker="o", label="cached")
        axes.set(yscale=scale, xlabel="tokens before this one", ylabel="milliseconds per token, fastest call")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    figure.savefig(file, dpi=150)


def measure_memory(report, model, tokenizer, name):
    n = model.config.n_positions
    prompt = random_ids(model.config, n - 40 if report.quick else 1).tolist()  # a long one fills the context soon
    n_one, n_long = n - len(prompt), 60 if report.quick else 3000
    # Case -> tokens and options. The process is larger after each of them, so what takes least comes first.
    asked = {
        "window 128, context shift": (n_long, {"window": min(128, n), "context_shift": True}),
        "one context": (n_one, {}),
        "context shift": (n_long, {"context_shift": True}),
        "4 texts of one context": (n_one, {"num_return_sequences": 4}),
    }
    more = {}

    def run(case):
        n_tokens, options = asked[case]
        marks, memory = [], []
        steps = minigen.stream(model, tokenizer, [prompt], seed=1, max_tokens=n_tokens, ignore_eos=True, **options)
        for step in steps:  # noqa: B007  the last one is used below
            marks.append(time.perf_counter())
            memory.append(resident())
        seconds, rows = np.diff(marks), options.get("num_return_sequences", 1)
        more[case] = {
            "tokens": n_tokens,
            "slowest ms": 1000 * float(seconds.max()),
            "MB cache": step.completion.timings.cache_bytes / 1e6,
            "MB process after a third": memory[n_tokens * rows // 3],
            "at the end": memory[-1],
        }
        return float(seconds.mean())

    def shows(_):
        growth = more["context shift"]["at the end"] / more["context shift"]["MB process after a third"] - 1
        one = more["one context"]["MB cache"]
        return (
            f"Keys and values of {n} tokens take {one:.1f} MB; with context shifts the process grows by {growth:.1%}."
        )

    title = f"Time per token, and memory, of texts from {name}, whose context is {n}"
    cases = {case: lambda case=case: run(case) for case in asked}
    report.table(title, cases, shows, lambda case, _: more[case], once=True, idea="window and context shift")


def main(arguments=None):
    arguments = parser(__doc__, repetitions=5, plot=True).parse_args(arguments)
    name = model_of(arguments)
    report = Report(f"KV cache of {name_of(name)}, float32", arguments, SECONDS)
    # First, while the process is small.
    written_by = arguments.model or arguments.shape or checkpoint("fairytale")
    measure_memory(report, *load_model(written_by), name_of(written_by))
    model, _ = load_model(name)
    loops = measure_loops(report, model)
    if arguments.plot:
        draw(loops, arguments.plot, f"{name_of(name)}: naive loop against cached loop")


if __name__ == "__main__":
    main()
