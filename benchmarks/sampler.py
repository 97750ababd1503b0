"""From logits to a token: each filter, and mixes, on 50,257 logits, next to the processors of transformers.

    python -m benchmarks.sampler

"likely" logits have a few likely tokens, as those of a model that is sure of itself; "flat" ones have tens of
thousands. transformers is measured if it is installed.
"""

import numpy as np

from benchmarks.harness import Report, columns, parser, ratio
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
    "temperature, top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    DEFAULT: {"temperature": 0.7, "top_p": 0.9},
    "all": {
        "temperature": 0.7,
        "top_k": 1000,
        "top_p": 0.95,
        "min_p": 0.001,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "no_repeat_ngram_size": 3,
        "logit_bias": {11: 1.0},
    },
}


def chooser(history, options):
    """minigen's choice of a token for a row of logits."""
    config, rng = SamplingConfig(**options), np.random.default_rng(0)
    return lambda logits: draw(probs(logits, history, config), rng)


def peer_chooser(history, options):
    """transformers' choice for the same options, by its own processors; None if it is not installed.

    Like the library's own sampling it ends with softmax and multinomial. It has no frequency penalty.
    """
    try:
        import torch
        from transformers.generation import logits_process as hf
    except ImportError:
        return None
    torch.set_num_threads(1)  # minigen's sampler has one thread too, and torch's idle ones would take its core
    makers = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "logit_bias": lambda x: hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in x.items()]),
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    if options["temperature"] == 0:
        return lambda logits: int(torch.from_numpy(logits).argmax())
    options = {name: value for name, value in options.items() if value != OFF.get(name)}
    chain = [makers[name](options[name]) for name in makers if name in options]
    input_ids = torch.tensor([history.ids])

    def choose(logits):
        scores = torch.from_numpy(logits)[None]
        for processor in chain:
            scores = processor(input_ids, scores)
        return int(torch.multinomial(torch.softmax(scores, -1), 1))

    return choose


def main(arguments=None):
    arguments = parser(__doc__, repetitions=30).parse_args(arguments)
    report = Report(f"From logits to a token, one row of {V:,} logits", arguments, SECONDS)
    # glibc returns freed blocks to the system, and faults them in again, until a larger block was freed once. A process
    # that runs a model has long done so; without this line every figure here doubles.
    np.ones(4_000_000)
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(V).astype(np.float32)
    likely = 3 * flat
    likely[rng.integers(0, V, 5)] += np.float32([14, 13, 13, 12, 11])
    history = History(rng.integers(0, 5000, 500).tolist(), 300)

    for kind, logits in (("likely", likely), ("flat", flat)):
        cases = {}
        for name, options in CASES.items():
            for engine, make in (("minigen", chooser), ("transformers", peer_chooser)):
                if choose := make(history, options):
                    cases[name, engine] = lambda choose=choose, logits=logits: choose(logits)

        def rows(timings, logits=logits):
            made = []
            for name, options in CASES.items():
                kept = np.count_nonzero(probs(logits, history, SamplingConfig(**options)))
                row = {"filters": name, **columns(timings[name, "minigen"]), "tokens kept": int(kept)}
                if (name, "transformers") in timings:
                    row["ms transformers"] = timings[name, "transformers"].median
                    row["ratio"] = ratio(timings, (name, "minigen"), (name, "transformers"))
                made.append(row)
            return made

        def shows(_, timings):
            peer = ""
            if (DEFAULT, "transformers") in timings:
                peer = f", {ratio(timings, (DEFAULT, 'minigen'), (DEFAULT, 'transformers')):.2f} of transformers' time"
            most = max(timings[name, "minigen"].median for name in CASES)
            return (
                f"A token at the default options takes {timings[DEFAULT, 'minigen'].median:.2f} ms{peer}; "
                f"the slowest of these options take {most:.2f} ms."
            )

        report.table(f"{kind} logits", cases, rows, shows, idea="sampling" if kind == "likely" else None)


if __name__ == "__main__":
    main()
