"""Forward passes: prompts, steps by batch, and passes that verify k tokens; in llama-bench's words where it has some.

    python -m benchmarks.decode --shape gpt2

    ppN               a prompt of N tokens, up to the logits of the next one
    sgemm             a product of two large square matrices: how fast this machine multiplies
    gemv              a large matrix-vector product: how fast this machine reads its memory
    tg16 @ d128       one more token after 128 others, mean of 16 in a row
    batch of k        the same for k texts in one pass: what beams and batches pay
    verify k tokens   one pass over k tokens of one text, with the logits of all: what speculation pays

Only forward passes are timed, no sampling. The token ids are random: the time does not depend on them.
"""

import math

import numpy as np

from benchmarks.harness import Report, load_model, model_of, name_of, parser, random_ids, ratio, timed

SECONDS = {"quick": 3, "full": 140}
STEPS = 16


def prompt_flops(config, n_tokens):
    """A multiplication and an addition for each weight and token, and for each pair of tokens in attention.

    In the last layer, what follows the keys and values is computed for the last token only.
    """
    shapes, last = config.parameter_shapes().items(), f"h.{config.n_layer - 1}."
    sizes = {name: math.prod(shape) for name, shape in shapes if name.startswith("h.") and len(shape) == 2}
    last_token = sum(size for name, size in sizes.items() if name.startswith(last) and "c_attn" not in name)
    every_token = sum(sizes.values()) - last_token
    pairs = n_tokens * (n_tokens + 1) // 2  # of a query with itself or an earlier key; q @ k and weights @ v
    pairs_of_layers = (config.n_layer - 1) * pairs + n_tokens
    return 2 * (every_token * n_tokens + last_token) + 4 * config.n_embd * pairs_of_layers


def measure_prompts(report, model):
    size = 512 if report.quick else 2048
    a, b, out = (np.full((size, size), 0.5, np.float32) for _ in range(3))
    cases, flops = {"sgemm": lambda: np.matmul(a, b, out=out)}, {"sgemm": 2 * size**3}
    for n_tokens in sorted({min(n_tokens, model.config.n_positions) for n_tokens in (128, 512)}):
        case, ids = f"pp{n_tokens}", random_ids(model.config, 1, n_tokens)
        cases[case] = lambda ids=ids: model.forward(ids, model.new_cache(1, ids.size))
        flops[case] = prompt_flops(model.config, n_tokens)

    def extra(case, timings):
        gflops = {name: flops[name] / 1e6 / timings[name].median for name in cases}
        gflops_cpu = {name: flops[name] / 1e6 / timings[name].cpu for name in cases}
        return {
            "tokens/s": "-" if case == "sgemm" else 1000 * int(case[2:]) / timings[case].median,
            "GFLOPS": gflops[case],
            "of sgemm": gflops[case] / gflops["sgemm"],
            "of sgemm, cpu": gflops_cpu[case] / gflops_cpu["sgemm"],
        }

    def shows(timings):
        wall, cpu = (extra(case, timings)[share] for share in ("of sgemm", "of sgemm, cpu"))  # of the longest prompt
        return f"{case} runs at {wall:.0%} of a large matrix product's rate, {cpu:.0%} in processor time."

    report.table("Prompts", cases, shows, extra, idea="a prompt in one pass")


def step_bytes(config):
    """Bytes of the weights that a step reads: all except the embeddings, of which it reads one row."""
    rows_only = {"wpe.weight"} if config.tie_word_embeddings else {"wpe.weight", "wte.weight"}
    return 4 * sum(math.prod(shape) for name, shape in config.parameter_shapes().items() if name not in rows_only)


def measure_steps(report, model):
    depth = min(128, model.config.n_positions - STEPS)
    matrix, vector = np.ones((10_000 if report.quick else 100_000, 1000), np.float32), np.ones(1000, np.float32)
    cases, n_tokens = {"gemv": lambda: matrix @ vector}, {}

    def add(case, batch, length, times):
        """times passes over `length` tokens of each row; those of single tokens follow each other."""
        ids, cache = random_ids(model.config, batch, length), model.new_cache(batch, depth + max(length, STEPS))
        model.forward(random_ids(model.config, batch, depth), cache)

        def step():
            if length > 1:
                cache.truncate(depth)
            model.forward(ids, cache, last_only=False)

        def call():
            cache.truncate(depth)
            return timed(step, times)

        cases[case], n_tokens[case] = call, batch * length

    one = f"tg{STEPS} @ d{depth}"
    add(one, 1, 1, STEPS)
    for k in (2, 4, 5, 8, 16):
        add(f"batch of {k}", k, 1, STEPS)
        add(f"verify {k} tokens", 1, k, 4)

    def extra(case, timings):
        nbytes = step_bytes(model.config) if case in n_tokens else matrix.nbytes
        return {
            "tokens/s": 1000 * n_tokens[case] / timings[case].median if case in n_tokens else "-",
            "against one step": ratio(timings, case, one) if case in n_tokens else "-",
            "GB/s": nbytes / 1e6 / timings[case].median,
            "of gemv": nbytes / matrix.nbytes * ratio(timings, "gemv", case),
        }

    def shows(timings):
        multiples = [f"{case} takes {ratio(timings, case, one):.2f}" for case in ("verify 4 tokens", "batch of 16")]
        share = extra(one, timings)["of gemv"]
        return f"A step reads weights at {share:.0%} of gemv's rate. As multiples of its time, {', '.join(multiples)}."

    title = f"Steps after {depth} tokens, each over {step_bytes(model.config) / 1e6:.0f} MB of weights"
    report.table(title, cases, shows, extra, idea="weights read once for several tokens")


def main(arguments=None):
    arguments = parser(__doc__, repetitions=10).parse_args(arguments)
    report = Report(f"Forward passes of {name_of(model_of(arguments))}, float32", arguments, SECONDS)
    model, _ = load_model(model_of(arguments))
    measure_prompts(report, model)
    measure_steps(report, model)


if __name__ == "__main__":
    main()
