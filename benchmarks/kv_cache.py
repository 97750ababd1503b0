"""What the K/V cache gives and takes: naive loop against cached, memory, saved prompts, long runs.

    python -m benchmarks.kv_cache --shape gpt2 --plot kv_cache.png

    naive, cached     a prompt and new tokens, without and with the cache. The naive loop runs the whole text again for
                      each token; it is timed at a few positions only, between which its total takes straight lines.
    n rows of m       the bytes of such a cache, by the formula 2 * n_layer * n_head * d_head * capacity * 4 * rows and
                      by `nbytes`, and by how much the process grows when such a cache is filled
    prompt of n       `generate` up to the first token: without a prompt cache, while one is saved, and with a saved one
    context shift     a text several times as long as the context, in parts: a token's time with choosing it, and what
                      the process and its cache hold at the part's end. Within "window 128" each token sees the last 128
                      ones only. The slowest token is the one after a shift, which runs half a context anew.

Sizes are in MB, millions of bytes. Long runs are of the bundled model where no other is asked for, and come first, in
a process that is still small. Targets are for the shape of gpt2 on two cores.
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
from benchmarks.harness import PAUSE, Timing, columns, measure, model_and_tokenizer_of, name_of, parser, plot, report

N_PROMPT = 128
SAVED_PROMPT = 900
PARTS = 6  # of a long run; the process is compared with what it was after a third, when all is allocated


def resident():
    """MB of this process that are in memory; nan where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if statm.is_file() else math.nan


def random_ids(config, n):
    return np.random.default_rng(0).integers(0, config.vocab_size, n).tolist()


# ---------------------------------------------------------------------------------------- naive against cached


def measure_loops(model, n_new, samples, repetitions):
    """(rows of totals, rows by position, milliseconds of each cached token)

    samples: the number of positions at which the naive loop is timed.
    """
    n_positions = model.config.n_positions
    n_prompt = min(N_PROMPT, n_positions // 2)
    n_new = min(n_new, n_positions - n_prompt)
    lengths = range(n_prompt, n_prompt + n_new)  # of the texts that are run for one token each
    ids = random_ids(model.config, n_prompt + n_new)
    steps = []  # of each cached run the seconds of each token

    def cached():
        cache = model.new_cache(capacity=n_prompt + n_new)
        marks = [time.perf_counter()]
        for length in lengths:
            model.forward([ids[int(cache.length[0]) : length]], cache)
            marks.append(time.perf_counter())
        steps.append(np.diff(marks))
        return marks[-1] - marks[0]

    cases = {"cached": cached}
    for length in np.linspace(lengths[0], lengths[-1], min(samples, n_new)).astype(int).tolist():
        cases[length] = lambda length=length: model.forward([ids[:length]])
    timings = measure(cases, repetitions, warm_up=1)

    whole = timings.pop("cached")
    per_token = 1000 * np.median(steps[1:], axis=0)  # without the warm-up
    by_length = np.array(list(timings.values())).T  # medians, minima, maxima
    naive = Timing(*(float(np.interp(lengths, list(timings), times).sum()) for times in by_length))
    label = f"{n_prompt} + {n_new} tokens"
    totals = [
        {
            "case": f"{name}, {label}",
            **columns(timing, "s", 1e-3),
            "against cached": timing.median / whole.median,
            "target": target,
        }
        for name, timing, target in (("naive", naive, "20"), ("cached", whole, "-"))
    ]
    by_position = [
        {
            "token": length + 1,
            "ms naive": timing.median,
            "ms cached": float(per_token[length - n_prompt]),
            "ratio": timing.median / float(per_token[length - n_prompt]),
        }
        for length, timing in timings.items()
    ]
    return totals, by_position, per_token.tolist()


# ---------------------------------------------------------------------------------------- memory


def fill(config, batch, capacity):
    """(bytes of a cache, MB resident before there was one, MB resident when it is full) of this process."""
    before = resident()
    cache = minigen.KVCache(config.n_layer, config.n_head, config.d_head, capacity, batch)
    for slots in cache.keys + cache.values:
        slots[:] = 1  # memory that was asked for becomes resident when it is written to
    return cache.nbytes, before, resident()


def measure_memory(config):
    rows = []
    few = min(256, config.n_positions)
    for batch, capacity in ((1, few), (8, few), (1, config.n_positions)):
        # In a process of its own, because in this one a cache may get memory that was given back and is still resident.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            nbytes, before, after = pool.apply(fill, (config, batch, capacity))
        formula = 2 * config.n_layer * config.n_head * config.d_head * capacity * 4 * batch
        rows.append(
            {
                "case": f"{batch} row{'s' * (batch > 1)} of {capacity}",
                "MB formula": formula / 1e6,
                "MB nbytes": nbytes / 1e6,
                "MB resident before": before,
                "MB resident after": after,
                "grown / formula": (after - before) * 1e6 / formula,
            }
        )
    return rows


# ---------------------------------------------------------------------------------------- saved prompts


def measure_saved_prompt(model, tokenizer, quick, repetitions):
    n_prompt = min(SAVED_PROMPT, model.config.n_positions - 12)
    ids = random_ids(model.config, n_prompt)
    reused = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompt.safetensors")

        def first_token(name, cache):
            if name == "saving":
                file.unlink(missing_ok=True)
            time.sleep(0 if quick else PAUSE)  # for BLAS's threads to come to rest
            start = time.perf_counter()
            (done,) = minigen.generate(model, tokenizer, [ids], cache=cache, max_tokens=1, temperature=0)
            seconds = time.perf_counter() - start
            reused[name] = done.timings.reused_tokens
            return seconds

        paths = {"without": None, "saving": file, "saved": file}
        cases = {name: lambda name=name, path=path: first_token(name, path) for name, path in paths.items()}
        timings = measure(cases, repetitions, warm_up=0 if quick else 1)
        megabytes = file.stat().st_size / 1e6
    return [
        {
            "case": f"prompt of {n_prompt}, {name}",
            **columns(timing),
            "tokens reused": reused[name],
            "MB file": megabytes if paths[name] else "-",
            "against without": timing.median / timings["without"].median,
        }
        for name, timing in timings.items()
    ]


# ---------------------------------------------------------------------------------------- long runs


def measure_long_run(model, tokenizer, label, n_tokens, **options):
    part = n_tokens // PARTS
    seconds, memory = np.zeros(n_tokens), []
    steps = minigen.stream(
        model, tokenizer, "", seed=1, max_tokens=n_tokens, context_shift=True, ignore_eos=True, **options
    )
    start = time.perf_counter()
    for i in range(n_tokens):
        step = next(steps)
        seconds[i] = time.perf_counter() - start
        if (i + 1) % part == 0:
            memory.append(resident())
        start = time.perf_counter()
    megabytes = step.completion.timings.cache_bytes / 1e6
    third = memory[PARTS // 3 - 1]
    rows = []
    for i, after in enumerate(memory):
        times = 1000 * seconds[i * part : (i + 1) * part]
        rows.append(
            {
                "case": label,
                "tokens": f"{i * part + 1} to {(i + 1) * part}",
                **{f"ms {statistic.__name__}": float(statistic(times)) for statistic in (np.median, np.min, np.max)},
                "MB cache": megabytes,
                "MB resident": after,
                f"against {PARTS // 3 * part}": after / third,
                "target": "1.02" if i + 1 == PARTS else "-",
            }
        )
    return rows


def measure_long_runs(model, tokenizer, n_tokens):
    shifted = measure_long_run(model, tokenizer, "context shift", n_tokens)
    return shifted + measure_long_run(model, tokenizer, "context shift, window 128", n_tokens, window=128)


# ---------------------------------------------------------------------------------------- results


def draw(by_position, per_token, file, title):
    """Milliseconds of each token of both loops."""
    with plot(file, title, panels=2) as (log, linear):
        for axes, scale in ((log, "log"), (linear, "linear")):
            positions = [row["token"] for row in by_position]
            axes.plot(positions, [row["ms naive"] for row in by_position], color="0.6", marker="o", label="naive")
            axes.plot(range(positions[0], positions[0] + len(per_token)), per_token, color="C0", label="cached")
            axes.set_yscale(scale)
            axes.set_xlabel("token of the text")
        linear.set_ylim(bottom=0)
        linear.legend()
        log.set_ylabel("milliseconds a token")


def main():
    options = parser(__doc__.splitlines()[0], repetitions=5, model=True, plot=True)
    options.add_argument("--new-tokens", type=int, default=128, metavar="N", help=f"after a prompt of {N_PROMPT}")
    arguments = options.parse_args()
    repetitions, samples, n_long = (2, 3, 300) if arguments.quick else (arguments.repetitions, 9, 3000)

    bundled = argparse.Namespace(model=None, shape=None, quick=True)
    asked = arguments if arguments.model or arguments.shape else bundled
    model, tokenizer = model_and_tokenizer_of(asked)
    long_runs = measure_long_runs(model, tokenizer, n_long)
    if name_of(asked) != name_of(arguments):
        model, tokenizer = model_and_tokenizer_of(arguments)
    memory = measure_memory(model.config)
    totals, by_position, per_token = measure_loops(model, arguments.new_tokens, samples, repetitions)
    saved = measure_saved_prompt(model, tokenizer, arguments.quick, repetitions)

    title = name_of(arguments)
    notes = [
        f"long runs are of {name_of(asked)}; the naive loop is timed at {len(by_position)} positions, its total is by "
        "straight lines between them"
    ]
    report(title, totals + by_position + memory + saved + long_runs, arguments, notes)
    if arguments.plot:
        draw(by_position, per_token, arguments.plot, f"{title}: naive loop against cached")


if __name__ == "__main__":
    main()
