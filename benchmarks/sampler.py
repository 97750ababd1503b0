"""From logits to a token: each filter, and mixes of filters, on 50,257 logits.

    python -m benchmarks.sampler

"likely" logits have a few likely tokens, as those of a model that is sure of itself; "flat" ones have tens of
thousands. transformers' processors for the same options are measured next to ours if they are installed.
"""

import importlib.util

import numpy as np

from benchmarks.harness import Report, parser, ratio
from minigen import History, SamplingConfig, draw, probs

SECONDS = {"quick": 2, "full": 10}
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
# The same options in transformers, in the order in which its own sampling applies them.
PEERS = {
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor",
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
}


def chooser(logits, history, options):
    """A function that chooses a token as minigen does."""
    config, rng = SamplingConfig(**options), np.random.default_rng(0)
    return lambda: draw(probs(logits, history, config), rng)


def peer_chooser(logits, history, options):
    """A function that chooses a token as transformers does: processors, softmax, multinomial."""
    import torch
    from transformers.generation import logits_process

    torch.set_num_threads(1)  # minigen's sampler has one thread too, and torch's idle ones would take its core
    scores, ids = torch.from_numpy(logits)[None], torch.tensor([history.ids])
    if options["temperature"] == 0:
        return lambda: int(scores.argmax())
    used = [name for name in PEERS if name in options and options[name] != OFF.get(name)]
    chain = [getattr(logits_process, PEERS[name])(options[name]) for name in used]

    def choose():
        filtered = scores
        for processor in chain:
            filtered = processor(ids, filtered)
        return int(torch.multinomial(torch.softmax(filtered, -1), 1))

    return choose


def main(arguments=None):
    arguments = parser(__doc__, repetitions=30, model=False).parse_args(arguments)
    report = Report(f"From logits to a token, one row of {V:,} logits", arguments, SECONDS)
    # glibc returns freed blocks to the system, and faults them in again, until a larger block was freed once. A process
    # that runs a model has long done so; without this line every figure here doubles.
    np.ones(4_000_000)
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(V).astype(np.float32)
    likely = 3 * flat
    likely[rng.integers(0, V, 5)] += np.float32([14, 13, 13, 12, 11])
    history = History(rng.integers(0, 5000, 500).tolist(), 300)
    peer = {}
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        peer = {case: f"{case}, transformers" for case in CASES}

    for kind, logits in (("likely", likely), ("flat", flat)):
        cases = {case: chooser(logits, history, options) for case, options in CASES.items()}
        cases |= {peer[case]: peer_chooser(logits, history, CASES[case]) for case in peer}

        def extra(case, timings, logits=logits):
            if case not in CASES:
                return None
            kept = np.count_nonzero(probs(logits, history, SamplingConfig(**CASES[case])))
            row = {"tokens kept": int(kept)}
            if case in peer:
                row |= {"ms transformers": timings[peer[case]].median, "ratio": ratio(timings, case, peer[case])}
            return row

        def shows(timings):
            compared = f", {ratio(timings, DEFAULT, peer[DEFAULT]):.2f} of transformers' time" if peer else ""
            return f"Choosing a token takes {timings[DEFAULT].median:.2f} ms at the default options{compared}."

        report.table(f"{kind} logits", cases, shows, extra=extra, idea="sampling" if kind == "likely" else None)


if __name__ == "__main__":
    main()
