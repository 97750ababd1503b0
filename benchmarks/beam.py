"""What a step of beam search costs, as a multiple of a greedy step, and what of it is not the forward pass.

    python -m benchmarks.beam --shape gpt2

Every case continues the same prompt of 128 random tokens by 64 (8 with --quick). A step is everything between two
results of the forward pass, mean of all after the prompt's: choosing the candidates, bringing the rows of the cache in
order, the next pass; the first one, which gives every beam its copy of the prompt's keys and values, is among them.
The shares are those of the last run: `KVCache.select` reorders, and whatever is neither that nor the forward pass
chooses. "rows copied" says how many beams a step moves to another row; on trained weights it may be another number
than on random ones.
"""

import time

import numpy as np

from benchmarks.harness import PAUSE, columns, measure, model_and_tokenizer_of, name_of, parser, report
from minigen import KVCache, generate

PROMPT = 128
BEAMS = {"greedy": 1, "4 beams": 4, "8 beams": 8}
TARGETS = {"4 beams": "1.4", "8 beams": "1.7"}


class WatchedCache(KVCache):
    """Notes the seconds of each reordering, and the rows it copied."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.select_seconds, self.copied = [], []

    def reorder(self, rows, shared=0):
        start = time.perf_counter()
        super().reorder(rows, shared)
        self.select_seconds.append(time.perf_counter() - start)
        self.copied.append(np.count_nonzero(np.asarray(rows) != np.arange(len(rows))))


class WatchedModel:
    """A model that notes when each forward pass begins and ends, and rests after the first, the prompt's."""

    def __init__(self, model, pause):
        self.model, self.config = model, model.config
        self.pause = pause

    def new_cache(self, batch, capacity):
        config = self.config
        self.began, self.ended = [], []
        self.cache = WatchedCache(config.n_layer, config.n_head, config.d_head, capacity, batch)
        return self.cache

    def forward(self, ids, cache, **options):
        self.began.append(time.perf_counter())
        logits = self.model.forward(ids, cache, **options)
        if len(self.began) == 1:
            time.sleep(self.pause)
        self.ended.append(time.perf_counter())
        return logits

    def figures(self):
        """(seconds a step, of that in the forward pass, of that reordering, rows copied a step) of the last run."""
        steps = len(self.ended) - 1
        forward = sum(self.ended[1:]) - sum(self.began[1:])
        sums = self.ended[-1] - self.ended[0], forward, sum(self.cache.select_seconds), sum(self.cache.copied)
        return tuple(float(value) / steps for value in sums)


def main():
    arguments = parser(__doc__.splitlines()[0], repetitions=10, model=True).parse_args()
    repetitions, new, pause = (2, 8, 0) if arguments.quick else (arguments.repetitions, 64, PAUSE)
    model, tokenizer = model_and_tokenizer_of(arguments)
    model = WatchedModel(model, pause)
    length = min(PROMPT, model.config.n_positions - new)
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, length).tolist()
    figures = {}

    def run(name):
        beams = BEAMS[name]
        options = {"num_beams": beams} if beams > 1 else {"temperature": 0}
        generate(model, tokenizer, [prompt], max_tokens=new, ignore_eos=True, seed=0, **options)
        figures[name] = model.figures()
        return figures[name][0]

    timings = measure({name: lambda name=name: run(name) for name in BEAMS}, repetitions, warm_up=1)
    rows = []
    for name, timing in timings.items():
        step, forward, select, copied = figures[name]
        rows.append(
            {
                "step": name,
                **columns(timing),
                "ratio": timing.median / timings["greedy"].median,
                "target": TARGETS.get(name, "-"),
                "% reordering": 100 * select / step,
                "% choosing": 100 * (step - forward - select) / step,
                "rows copied": copied,
            }
        )
    report(f"{name_of(arguments)}: a step after a prompt of {length}, mean of {new - 1}", rows, arguments)


if __name__ == "__main__":
    main()
