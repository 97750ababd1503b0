"""What the KV cache saves and what it costs: naive loop against cached loop, memory, prompt caches, long texts.

    python -m benchmarks.kv_cache --shape gpt2 --plot kv_cache.png

    tg1 @ dN         one more token after N others. With the cache, a forward pass over that token; the naive loop
                     runs the forward pass over the whole text
    prompt of N      `generate` up to the first token: without a prompt-cache file, while one is saved, and from a
                     saved one
    context shift    a text several times as long as the context; the slowest token is the one after a shift, for
                     which half a context is computed again. With "window 128" each token sees the last 128 tokens only

MB are millions of bytes; resident memory is that of the process. Long texts come from the bundled model unless --model
or --shape asks for another one.
"""

import argparse
import math
import multiprocessing
import os
import tempfile
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
    cases = {}
    for depth in depths:
        cache = model.new_cache(capacity=depth + 1)
        model.forward(ids[:, :depth], cache)

        def cached(cache=cache, depth=depth):
            cache.truncate(depth)
            model.forward(ids[:, depth : depth + 1], cache)

        cases[depth, "cached"] = lambda cached=cached: timed(cached, 4)
        cases[depth, "naive"] = lambda depth=depth: model.forward(ids[:, : depth + 1])
    shallow = depths[0]

    def rows(timings):
        return [
            {
                "case": f"tg1 @ d{depth}",
                "ms cached": timings[depth, "cached"].median,
                "min": timings[depth, "cached"].min,
                "max": timings[depth, "cached"].max,
                "cpu ms": timings[depth, "cached"].cpu,
                f"against d{shallow}": ratio(timings, (depth, "cached"), (shallow, "cached")),
                "ms naive": timings[depth, "naive"].median,
                "naive min": timings[depth, "naive"].min,
                "naive max": timings[depth, "naive"].max,
                "naive / cached": ratio(timings, (depth, "naive"), (depth, "cached")),
            }
            for depth in depths
        ]

    def shows(rows, timings):
        n_prompt = min(LOOP, (last + 1) // 2)
        after = range(n_prompt - 1, 2 * n_prompt - 1)  # depths of the tokens from which the new ones follow
        curve = {way: np.interp(after, depths, [timings[d, way].median for d in depths]) for way in ("naive", "cached")}
        gain = curve["naive"].sum() / (curve["naive"][0] + curve["cached"][1:].sum())  # the prompt is run by both
        deep = depths[-1]
        return (
            f"For a prompt of {n_prompt} and {n_prompt} new tokens the cached loop is {gain:.1f} times as fast as the "
            f"naive one (its time between the measured depths is interpolated); a cached step after {deep} tokens takes "
            f"{ratio(timings, (deep, 'cached'), (shallow, 'cached')):.2f} times as long as one after {shallow}."
        )

    return report.table("One token with and without the cache", cases, rows, shows, idea="KV cache")


def draw(rows, file, title):
    """Milliseconds per token of both loops by depth, on a linear and a logarithmic scale."""
    depths = [int(row["case"].partition("@ d")[2]) for row in rows]
    with plot(file, title, panels=2) as panels:
        for axes, scale in zip(panels, ("linear", "log"), strict=True):
            for way, colour in (("naive", "0.6"), ("cached", "C0")):
                fastest = [row["min" if way == "cached" else "naive min"] for row in rows]  # least disturbed by others
                axes.plot(depths, fastest, color=colour, marker="o", label=way)
            axes.set_yscale(scale)
            axes.set_xlabel("tokens before this one")
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("milliseconds per token, fastest run")
        panels[0].legend()


def grow(config, batch, capacity, window):
    """(MB of a cache's arrays, MB by which this process grows when they are filled)."""
    new_cache = minigen.KVCache  # imports what it needs, which is not the cache's memory
    before = resident()
    cache = new_cache(config.n_layer, config.n_head, config.d_head, capacity, batch, window)
    for slots in cache.keys + cache.values:
        slots[:] = 1  # allocated memory becomes resident when it is written to
    return cache.nbytes / 1e6, resident() - before


def measure_memory(report, config):
    few = min(256, config.n_positions)
    asked = {f"{n} x {few}": (n, few, None) for n in (1, 8)}
    asked[f"1 x {config.n_positions}"] = 1, config.n_positions, None
    asked["window 128"] = 1, min(192, config.n_positions), min(128, config.n_positions)
    grown = {}

    def run(name):
        # In a fresh process, because this one may still hold memory that an earlier cache has given back.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            grown[name] = pool.apply(grow, (config, *asked[name]))

    def rows(_):
        return [
            {"rows x tokens": name, "MB nbytes": nbytes, "MB grown": more, "grown / nbytes": more / nbytes}
            for name, (nbytes, more) in grown.items()
        ]

    def shows(rows, _):
        most = rows[2]
        return f"A text of {config.n_positions} tokens takes {most['MB nbytes']:.1f} MB of keys and values."

    cases = {name: lambda name=name: run(name) for name in asked}
    report.table("Memory of a cache", cases, rows, shows, repetitions=1, warm_up=0)


def measure_prompt_cache(report, model, tokenizer):
    n_prompt = min(SAVED_PROMPT, model.config.n_positions - 12)
    ids = random_ids(model.config, n_prompt).tolist()
    reused = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompt.safetensors")

        def first_token(name):
            if name == "saving":
                file.unlink(missing_ok=True)

            def call():
                path = None if name == "without" else file
                (done,) = minigen.generate(model, tokenizer, [ids], cache=path, max_tokens=1, temperature=0)
                reused[name] = done.timings.reused_tokens

            return timed(call)

        def rows(timings):
            return [
                {
                    "case": name,
                    "ms": timing.median,
                    "min": timing.min,
                    "max": timing.max,
                    "cpu ms": timing.cpu,
                    "tokens reused": reused[name],
                    "MB file": "-" if name == "without" else file.stat().st_size / 1e6,
                    "against without": ratio(timings, name, "without"),
                }
                for name, timing in timings.items()
            ]

        def shows(_, timings):
            return (
                f"The first token after a saved prompt of {n_prompt} takes {ratio(timings, 'saved', 'without'):.3f} of "
                f"the time without a file; saving takes {ratio(timings, 'saving', 'without') - 1:+.0%}."
            )

        cases = {name: lambda name=name: first_token(name) for name in ("without", "saving", "saved")}
        title = f"Prompt of {n_prompt} up to its first token, with a prompt-cache file"
        report.table(title, cases, rows, shows, idea="prompt cache")


def measure_long_texts(report, model, tokenizer, name):
    n_tokens = (1 if report.quick else 6) * min(512, model.config.n_positions) + 88
    made = {}

    def run(case, options):
        seconds, memory = [], []
        steps = minigen.stream(
            model, tokenizer, "", seed=1, max_tokens=n_tokens, context_shift=True, ignore_eos=True, **options
        )
        start = time.perf_counter()
        for step in steps:
            seconds.append(time.perf_counter() - start)
            memory.append(resident())
            start = time.perf_counter()
        ms = 1000 * np.array(seconds)
        made[case] = {
            "case": case,
            "tokens": len(ms),
            "ms first third": float(np.median(ms[: n_tokens // 3])),
            "ms last third": float(np.median(ms[-n_tokens // 3 :])),
            "slowest": float(ms[1:].max()),
            "MB cache": step.completion.timings.cache_bytes / 1e6,
            "MB resident at 1/3": memory[n_tokens // 3],
            "at the end": memory[-1],
        }

    def shows(rows, _):
        growth = max(row["at the end"] / row["MB resident at 1/3"] for row in rows) - 1
        slower = max(row["ms last third"] / row["ms first third"] for row in rows)
        return (
            f"From the first third of the text to its end, resident memory grows by at most {growth:.1%}; a token of "
            f"the last third takes at most {slower:.2f} times as long as one of the first."
        )

    cases = {
        "context shift": lambda: run("context shift", {}),
        "window 128": lambda: run("window 128", {"window": min(128, model.config.n_positions)}),
    }
    title = f"A text of {n_tokens} tokens from {name}, whose context is {model.config.n_positions}"
    report.table(title, cases, lambda _: list(made.values()), shows, repetitions=1, warm_up=0)


def main(arguments=None):
    arguments = parser(__doc__, repetitions=5, model=True, plot=True).parse_args(arguments)
    report = Report(f"KV cache of {name_of(arguments)}, float32", arguments, SECONDS)
    # Long texts first, while the process is small: resident memory then shows what they take.
    bundled = argparse.Namespace(model=None, shape=None, quick=True)
    asked = arguments if arguments.model or arguments.shape else bundled
    model, tokenizer = load_model(asked)
    measure_long_texts(report, model, tokenizer, name_of(asked))
    if asked is bundled and not arguments.quick:
        model, tokenizer = load_model(arguments)
    loops = measure_loops(report, model)
    measure_memory(report, model.config)
    measure_prompt_cache(report, model, tokenizer)
    if arguments.plot:
        draw(loops, arguments.plot, f"{name_of(arguments)}: naive loop against cached loop")


if __name__ == "__main__":
    main()
