"""From logits to a token: each filter, and mixes of filters, on 50,257 logits.

    python -m benchmarks.sampler

"likely" logits have a few likely tokens, as in a model that is sure of itself; "flat" ones have tens of thousands.
"""

import numpy as np

from benchmarks.harness import Report, parser
from minigen import History, Noise, SamplingConfig, next_token_probs, sample_token

SECONDS = {"quick": 1, "full": 3}
V = 50257
OFF = {"temperature": 1.0, "top_p": 1.0}
DEFAULT = "temperature, top-p 0.9 (default)"
CASES = {
    "greedy": {"temperature": 0.0, "top_p": 1.0},
    "temperature": {"temperature": 0.7, "top_p": 1.0},
    "top-k 50": OFF | {"top_k": 50},
    "top-p 0.9": OFF | {"top_p": 0.9},
    "min-p 0.05": OFF | {"min_p": 0.05},
    "typical-p 0.9": OFF | {"typical_p": 0.9},
    "repetition penalty 1.2": OFF | {"repetition_penalty": 1.2},
    "no repeated 3-gram": OFF | {"no_repeat_ngram_size": 3},
    DEFAULT: {"temperature": 0.7, "top_p": 0.9},
    "temperature, top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}


def main(arguments=None):
    arguments = parser(__doc__, repetitions=30, model=False).parse_args(arguments)
    report = Report(f"From logits to a token, one row of {V:,} logits", arguments, SECONDS)
    # glibc returns freed blocks to the system, and faults them in again, until a larger block has been freed once. A
    # process that runs a model has long done so; without this line every figure here doubles.
    np.ones(4_000_000)
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(V).astype(np.float32)
    likely = 3 * flat
    likely[rng.integers(0, V, 5)] += np.float32([14, 13, 13, 12, 11])
    noise = Noise(seed=0, number=0, position=500)
    history = History(rng.integers(0, 5000, 500).tolist(), 300)

    for kind, logits in (("likely", likely), ("flat", flat)):

        def distribution(case, logits=logits):
            return next_token_probs(logits, history, SamplingConfig(**CASES[case]))

        def extra(case, _, distribution=distribution):
            return {"tokens kept": int(np.count_nonzero(distribution(case)))}

        def shows(timings):
            plain = timings["temperature"].median
            return (
                f"A token takes {timings[DEFAULT].median:.2f} ms at the default options, {plain:.2f} without a filter."
            )

        cases = {case: lambda case=case, p=distribution: sample_token(p(case), noise) for case in CASES}
        report.table(f"{kind} logits", cases, shows, extra, idea="sampling" if kind == "likely" else None)


if __name__ == "__main__":
    main()
