"""Forward passes: prompts, steps by batch, and passes that verify k tokens; in llama-bench's words where it has some.

    python -m benchmarks.decode --shape gpt2

    ppN               a prompt of N tokens, up to the logits of the next one
    sgemm             a product of two large square matrices: how fast this machine multiplies
    gemv              one large matrix-vector product: how fast this machine reads its memory
    tg16 @ d128       one more token after 128 others, mean of 16 in a row
    batch of k        the same for k texts in one pass: what beams and batches pay
    verify k tokens   one pass over k tokens of one text, with the logits of all: what speculation pays

Only forward passes are timed, no sampling, and the token ids are random: the time does not depend on them. GFLOPS count
what a prompt needs: the products with all matrices except the head, and attention to the tokens before each. GB/s count
the weights that a step reads.
"""

import math

import numpy as np

from benchmarks.harness import Report, load_model, name_of, parser, random_ids, ratio, timed

SECONDS = {"quick": 3, "full": 60}
PROMPTS = (128, 512)
DEPTH = 128
ROWS = (1, 2, 4, 5, 8, 16)
STEPS = 16


def filled_cache(model, depth, more, batch=1):
    """A cache whose rows hold `depth` tokens, with room for `more`."""
    cache = model.new_cache(batch, depth + more)
    model.forward(random_ids(model.config, batch, depth), cache)
    return cache


def prompt_flops(config, n_tokens):
    """A multiplication and an addition for each weight and token, and for each pair of tokens in attention."""
    shapes = config.parameter_shapes().items()
    weights = sum(math.prod(shape) for name, shape in shapes if name.startswith("h.") and len(shape) == 2)
    pairs = n_tokens * (n_tokens + 1) // 2  # of a query with itself or an earlier key; q @ k and weights @ v
    return 2 * weights * n_tokens + 4 * config.n_layer * config.n_embd * pairs


def step_bytes(config):
    """Bytes of the weights that a step reads: all except the embeddings, of which it reads one row."""
    rows_only = {"wpe.weight"} if config.tie_word_embeddings else {"wpe.weight", "wte.weight"}
    return 4 * sum(math.prod(shape) for name, shape in config.parameter_shapes().items() if name not in rows_only)


def measure_prompts(report, model):
    size = 512 if report.quick else 2048
    a, b, out = (np.full((size, size), 0.5, np.float32) for _ in range(3))
    cases, flops = {"sgemm": lambda: np.matmul(a, b, out=out)}, {"sgemm": 2 * size**3}
    for n_tokens in sorted({min(n_tokens, model.config.n_positions) for n_tokens in PROMPTS}):
        ids, cache = random_ids(model.config, 1, n_tokens), model.new_cache(capacity=n_tokens)

        def prompt(ids=ids, cache=cache):
            cache.truncate(0)
            model.forward(ids, cache)

        cases[f"pp{n_tokens}"] = prompt
        flops[f"pp{n_tokens}"] = prompt_flops(model.config, n_tokens)

    def rate(case, timings):
        return flops[case] / 1e6 / timings[case].median

    def cpu_share(case, timings):
        return flops[case] / flops["sgemm"] * timings["sgemm"].cpu / timings[case].cpu

    def extra(case, timings):
        return {
            "tokens/s": "-" if case == "sgemm" else 1000 * int(case[2:]) / timings[case].median,
            "GFLOPS": rate(case, timings),
            "of sgemm": rate(case, timings) / rate("sgemm", timings),
            "of sgemm, cpu": cpu_share(case, timings),
        }

    def shows(timings):
        case = list(cases)[-1]
        return (
            f"{case} runs at {rate(case, timings) / rate('sgemm', timings):.0%} of the rate of a large matrix product, "
            f"{cpu_share(case, timings):.0%} in processor time."
        )

    report.table("Prompts", cases, shows, extra=extra, idea="a prompt in one pass")


def measure_steps(report, model):
    depth = min(DEPTH, model.config.n_positions - STEPS)
    matrix = np.ones((40 if report.quick else 400, 250, 1000), np.float32).reshape(-1, 1000)  # a million bytes each
    vector = np.ones(1000, np.float32)
    # Which orientation is faster depends on the BLAS; the better one counts.
    gemv = {"gemv": lambda: matrix @ vector, "gemv, transposed": lambda: matrix[:, 0] @ matrix}
    step = f"tg{STEPS} @ d{depth}"
    cases, n_tokens = dict(gemv), {}
    for k in ROWS:
        cache = filled_cache(model, depth, STEPS, k)
        tokens = random_ids(model.config, k, 1)

        def batch(cache=cache, tokens=tokens):
            cache.truncate(depth)
            return timed(lambda: model.forward(tokens, cache), STEPS)

        name = step if k == 1 else f"batch of {k}"
        cases[name], n_tokens[name] = batch, k
        if k > 1:
            one, text = filled_cache(model, depth, k), random_ids(model.config, 1, k)

            def verify(cache=one, text=text):
                def once():
                    cache.truncate(depth)
                    model.forward(text, cache, last_only=False)

                return timed(once, 4)

            cases[f"verify {k} tokens"], n_tokens[f"verify {k} tokens"] = verify, k

    def extra(case, timings):
        nbytes = matrix.nbytes if case in gemv else step_bytes(model.config)
        read = min(timings[name].median for name in gemv) / matrix.nbytes
        return {
            "tokens/s": 1000 * n_tokens[case] / timings[case].median if case in n_tokens else "-",
            "against one step": ratio(timings, case, step) if case in n_tokens else "-",
            "GB/s": nbytes / 1e6 / timings[case].median,
            "of gemv": nbytes * read / timings[case].median,
        }

    def shows(timings):
        return (
            f"A step reads its weights at {extra(step, timings)['of gemv']:.0%} of a matrix-vector product's rate. As "
            f"multiples of its time, a batch of 4 takes {ratio(timings, 'batch of 4', step):.2f}, a batch of 16 "
            f"{ratio(timings, 'batch of 16', step):.2f}, verifying 4 tokens {ratio(timings, 'verify 4 tokens', step):.2f}."
        )

    title = f"Steps after {depth} tokens, each over {step_bytes(model.config) / 1e6:.0f} MB of weights"
    report.table(title, cases, shows, extra=extra, idea="weights read once for several rows")


def main(arguments=None):
    arguments = parser(__doc__, repetitions=10).parse_args(arguments)
    model, _ = load_model(arguments)
    report = Report(f"Forward passes of {name_of(arguments)}, float32", arguments, SECONDS)
    measure_prompts(report, model)
    measure_steps(report, model)


if __name__ == "__main__":
    main()
