"""What choosing a token costs: each filter, and mixes, on 50,257 logits, beside the transformers library's processors.

    python -m benchmarks.sampler

"likely" logits leave a few likely tokens, as a model that is sure of itself does; "flat" ones leave tens of thousands.
"""

import numpy as np

from benchmarks.harness import columns, measure, parser, report
from minigen import History, SamplingConfig, draw, probs

V = 50257
OFF = {"temperature": 1.0, "top_p": 1.0}
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
    "temperature, top-p 0.9 (default)": {"temperature": 0.7, "top_p": 0.9},
    "all": {
        "temperature": 0.7,
        "top_k": 1000,
        "top_p": 0.95,
        "min_p": 0.001,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "no_repeat_ngram_size": 3,
        "logit_bias": {11: 1.0},
    },
}


def peers(options, ids):
    """transformers' processors for the same options, as a callable on a torch row; None where it is not installed.

    Like the library's own sampling, it ends with softmax and multinomial.
    """
    try:
        import torch
        from transformers.generation import logits_process as hf
    except ImportError:
        return None
    # The other side has one thread too, and idle threads of torch's would spin on the cores that this one needs.
    torch.set_num_threads(1)
    if "presence_penalty" in options:  # it has no such penalty; the row then costs it nothing
        options = {name: value for name, value in options.items() if name != "presence_penalty"}
    made = {
        "repetition_penalty": lambda x: hf.RepetitionPenaltyLogitsProcessor(x),
        "no_repeat_ngram_size": lambda x: hf.NoRepeatNGramLogitsProcessor(x),
        "logit_bias": lambda x: hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in x.items()]),
        "temperature": lambda x: hf.TemperatureLogitsWarper(x) if x != 1 else None,
        "top_k": lambda x: hf.TopKLogitsWarper(x),
        "top_p": lambda x: hf.TopPLogitsWarper(x) if x < 1 else None,
        "min_p": lambda x: hf.MinPLogitsWarper(x),
        "typical_p": lambda x: hf.TypicalLogitsWarper(x),
    }
    if options.get("temperature") == 0:
        return lambda logits: int(torch.argmax(logits))
    chain = [made[name](options[name]) for name in made if name in options]
    chain = [processor for processor in chain if processor is not None]
    input_ids = torch.tensor([ids])

    def choose(logits):
        scores = logits[None]
        for processor in chain:
            scores = processor(input_ids, scores)
        return int(torch.multinomial(torch.softmax(scores, -1), 1))

    return choose


def main():
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    repetitions = 3 if arguments.quick else arguments.repetitions
    # glibc gives freed blocks back to the system, to be faulted in again, until one larger than them was freed once.
    # In a process that runs a model that has happened long ago; without this line every figure here doubles.
    np.ones(4_000_000)
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(V).astype(np.float32)
    likely = 3 * flat
    likely[rng.integers(0, V, 5)] += np.float32([14, 13, 13, 12, 11])
    ids = rng.integers(0, 5000, 500).tolist()
    history = History(ids, 300)

    rows = []
    for shape, logits in (("likely", likely), ("flat", flat)):
        for name, options in CASES.items():
            config = SamplingConfig(**options)
            calls = {"minigen": lambda config=config, logits=logits: draw(probs(logits, history, config), rng)}
            if peer := peers(options, ids):
                import torch

                tensor = torch.from_numpy(logits)
                calls["transformers"] = lambda peer=peer, tensor=tensor: peer(tensor)
            timings = measure(calls, repetitions)
            row = {"logits": shape, "filters": name, **columns(timings["minigen"])}
            row["kept"] = int(np.count_nonzero(probs(logits, history, config)))
            if peer:
                row["ms transformers"] = timings["transformers"].median
                row["ratio"] = timings["minigen"].median / timings["transformers"].median
            rows.append(row)
    report("probs and draw for one row of 50,257 logits, milliseconds", rows, arguments)


if __name__ == "__main__":
    main()
