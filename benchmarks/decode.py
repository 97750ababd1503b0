"""What the model costs: prompts, one step at several depths, and passes over several rows, in llama-bench's words.

    python -m benchmarks.decode --shape gpt2 --plot decode.png

    ppN                      a prompt of N tokens, up to the logits of the next one
    sgemm                    a product of two large square matrices: how fast this machine multiplies
    tgN @ dM                 one more token after M others, mean of N in a row
    gemv                     reading a billion bytes in a large matrix-vector product: how fast this machine reads
    k new tokens of a text   one pass with the logits of all k, after 128 tokens: what speculation pays
    k texts, a token each    one pass, after 128 tokens each: what beams and batches pay

Only the forward pass is timed, no choosing of tokens, and their ids are random: the time depends on neither. GFLOPS
count what a prompt needs, the products with all matrices but the head and the attention of each token to those before
it; GB/s count the weights that every token reads. The cases of a table are timed in turn. Targets are for the shape of
gpt2 on two cores.
"""

import math
import time

import numpy as np

from benchmarks.harness import PAUSE, columns, gemv_rate, measure, model_of, name_of, parser, plot, report

PROMPTS = (128, 512)
DEPTHS = (10, 128, 512, 1000)  # no deeper than the model takes
ROWS = {1: "-", 2: "1.15", 4: "1.2", 5: "1.25", 8: "1.35", 16: "1.9"}  # rows in a pass -> target, against one row
ONE_TEXT, TEXTS = "new tokens of a text", "texts, a token each"
# Several in one timed call: the first of them finds cold what other cases left behind.
PASSES = 4


def random_ids(config, *shape):
    return np.random.default_rng(0).integers(0, config.vocab_size, shape)


def cache_at(model, depth, more, batch=1):
    """A cache whose rows all hold the same `depth` tokens, with room for `more`."""
    ids, cache = random_ids(model.config, 1, depth), model.new_cache(capacity=depth + more)
    for start in range(0, depth, 16):  # few enough at a time for minigen's own threads
        model.forward(ids[:, start : min(start + 16, depth)], cache)
    cache.reorder([0] * batch)
    return cache


# ---------------------------------------------------------------------------------------- prompts


def prompt_flops(config, n_tokens):
    """Operations that a prompt needs: a multiplication and an addition for each weight and token, and attention."""
    shapes = config.parameter_shapes().items()
    weights = sum(math.prod(shape) for name, shape in shapes if name.startswith("h.") and len(shape) == 2)
    pairs = n_tokens * (n_tokens + 1) // 2  # of a token with itself or an earlier one: a product for q @ k, one for @ v
    return 2 * weights * n_tokens + 4 * config.n_layer * config.n_embd * pairs


def measure_prompts(model, quick, repetitions):
    size = 512 if quick else 2048
    a, b, out = (np.full((size, size), 0.5, np.float32) for _ in range(3))
    cases, flops = {"sgemm": lambda: np.matmul(a, b, out=out)}, {"sgemm": 2 * size**3}
    for n_tokens in sorted({min(n_tokens, model.config.n_positions) for n_tokens in PROMPTS}):
        ids, cache = random_ids(model.config, 1, n_tokens), model.new_cache(capacity=n_tokens)

        def prompt(ids=ids, cache=cache):
            cache.truncate(0)
            model.forward(ids, cache)

        cases[f"pp{n_tokens}"] = prompt
        flops[f"pp{n_tokens}"] = prompt_flops(model.config, n_tokens)
    timings = measure(cases, repetitions, warm_up=1)
    rates = {case: flops[case] / 1e6 / timing.median for case, timing in timings.items()}
    return [
        {
            "case": case,
            **columns(timing),
            "tokens/s": 1000 * int(case[2:]) / timing.median if case != "sgemm" else "-",
            "GFLOPS": rates[case],
            "of sgemm": rates[case] / rates["sgemm"],
            "target": "0.8" if case == "pp512" else "-",
        }
        for case, timing in timings.items()
    ]


# ---------------------------------------------------------------------------------------- steps


def step_bytes(config):
    """Bytes of the weights that every step reads: all but the embeddings, of which it reads a row."""
    rows_only = {"wpe.weight"} if config.tie_word_embeddings else {"wpe.weight", "wte.weight"}
    return 4 * sum(math.prod(shape) for name, shape in config.parameter_shapes().items() if name not in rows_only)


def measure_steps(model, steps, quick, repetitions):
    pause, megabytes = (0, 40) if quick else (PAUSE, 400)
    cases = {"gemv": lambda: 1 / gemv_rate(megabytes, repetitions=3)}  # seconds for a billion bytes
    for depth in sorted({min(depth, model.config.n_positions - steps) for depth in DEPTHS}):
        ids, cache = random_ids(model.config, steps, 1, 1), cache_at(model, depth, steps)

        def step(ids=ids, cache=cache, depth=depth):
            cache.truncate(depth)
            time.sleep(pause)  # gemv may have woken BLAS's threads
            start = time.perf_counter()
            for token in ids:
                model.forward(token, cache)
            return (time.perf_counter() - start) / len(ids)

        cases[f"tg{steps} @ d{depth}"] = step
    timings = measure(cases, repetitions, warm_up=1)
    rates = {case: step_bytes(model.config) / 1e6 / timing.median for case, timing in timings.items()}
    rates["gemv"] = 1000 / timings["gemv"].median
    _, shallow, *_, deep = timings
    against = f"against {shallow.split()[-1]}"
    rows = []
    for case, timing in timings.items():
        is_step = case != "gemv"
        rows.append(
            {
                "case": case,
                **columns(timing),
                "tokens/s": 1000 / timing.median if is_step else "-",
                against: timing.median / timings[shallow].median if is_step else "-",
                "GB/s": rates[case],
                "of gemv": rates[case] / rates["gemv"],
                "target": f"1.25 {against}" if case == deep else "0.92 of gemv" if is_step else "-",
            }
        )
    return rows


# ---------------------------------------------------------------------------------------- rows


def measure_rows(model, repetitions):
    depth = min(128, model.config.n_positions - max(ROWS))
    cases = {}
    for rows in ROWS:
        for way, batch, n_tokens in ((ONE_TEXT, 1, rows), (TEXTS, rows, 1)):
            ids, cache = random_ids(model.config, batch, n_tokens), cache_at(model, depth, n_tokens, batch)

            def call(ids=ids, cache=cache):
                seconds = 0.0
                for _ in range(PASSES):
                    cache.truncate(depth)
                    start = time.perf_counter()
                    model.forward(ids, cache, last_only=False)
                    seconds += time.perf_counter() - start
                return seconds / PASSES

            cases[rows, way] = call
    timings = measure(cases, repetitions, warm_up=1)
    one = {way: timings[1, way].median for way in (ONE_TEXT, TEXTS)}
    return [
        {
            "case": f"{rows} {way}",
            **columns(timing),
            "tokens/s": 1000 * rows / timing.median,
            "against 1": timing.median / one[way],
            "target": ROWS[rows],
        }
        for (rows, way), timing in timings.items()
    ]


# ---------------------------------------------------------------------------------------- results


def draw(steps, rows, file, title):
    """Time of a pass by its number of rows, and of a step by the tokens before it; both from 0."""
    with plot(file, title, panels=2) as (by_rows, by_depth):
        for way in (ONE_TEXT, TEXTS):
            shown = {int(row["case"].split()[0]): row["ms median"] for row in rows if row["case"].endswith(way)}
            by_rows.plot(list(shown), list(shown.values()), marker="o", label=way)
        by_rows.legend()
        by_rows.set_xticks(list(ROWS))
        by_rows.set_xlabel("rows in one pass")
        by_rows.set_ylabel("milliseconds a pass")
        shown = {int(row["case"].partition("@ d")[2]): row["ms median"] for row in steps if "@" in row["case"]}
        by_depth.plot(list(shown), list(shown.values()), marker="o")
        by_depth.set_xlabel("tokens before the step")
        by_depth.set_ylabel("milliseconds a step")
        for axes in (by_rows, by_depth):
            axes.set_ylim(bottom=0)


def main():
    arguments = parser(__doc__.splitlines()[0], repetitions=10, model=True, plot=True).parse_args()
    repetitions, steps = (2, 4) if arguments.quick else (arguments.repetitions, 16)
    model = model_of(arguments)
    # Prompts apart from the rest, because BLAS's threads may go on spinning after them.
    prompts = measure_prompts(model, arguments.quick, repetitions)
    by_depth = measure_steps(model, steps, arguments.quick, repetitions)
    by_rows = measure_rows(model, repetitions)

    title = f"{name_of(arguments)}, float32, milliseconds"
    notes = [f"{step_bytes(model.config) / 1e6:.1f} MB of weights are read by a step"]
    report(title, prompts + by_depth + by_rows, arguments, notes)
    if arguments.plot:
        draw(by_depth, by_rows, arguments.plot, title)


if __name__ == "__main__":
    main()
