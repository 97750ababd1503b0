"""Steps of beam search, as multiples of a greedy step.

    python -m benchmarks.beam --shape gpt2

Every case continues the same prompt of 128 random tokens; a step is everything from one token to the next: the forward
pass, the choice of candidates, and the new order of the cache's rows. "batch of k" is the forward pass over k rows
alone, so the rest of a step with k beams is what beam search adds.
"""

from benchmarks.decode import filled_cache
from benchmarks.harness import Report, load_model, name_of, parser, random_ids, ratio, timed
from minigen import generate

SECONDS = {"quick": 3, "full": 100}
PROMPT = 128
BEAMS = (1, 4, 8)


def main(arguments=None):
    arguments = parser(__doc__, repetitions=5).parse_args(arguments)
    model, tokenizer = load_model(arguments)
    report = Report(f"Beam search of {name_of(arguments)}, float32", arguments, SECONDS)
    new = 8 if report.quick else 64
    length = min(PROMPT, model.config.n_positions - new)
    prompt = random_ids(model.config, length).tolist()

    def step(beams):
        options = {"num_beams": beams} if beams > 1 else {"temperature": 0}
        (done,) = generate(model, tokenizer, [prompt], max_tokens=new, ignore_eos=True, seed=0, **options)
        return done.timings.seconds / (done.timings.tokens - 1)  # the first token follows from the prompt's pass

    def forward(cache, tokens):
        cache.truncate(length)
        return timed(lambda: model.forward(tokens, cache), new)[0]

    cases = {"greedy" if beams == 1 else f"{beams} beams": lambda beams=beams: step(beams) for beams in BEAMS}
    for k in BEAMS:
        filled = filled_cache(model, length, new, k), random_ids(model.config, k, 1)
        cases[f"batch of {k}"] = lambda filled=filled: forward(*filled)

    def extra(case, timings):
        return {"against greedy": ratio(timings, case, "greedy")}

    def shows(timings):
        return (
            "As multiples of a greedy step's time, "
            + " and ".join(
                f"a step with {k} beams takes {ratio(timings, f'{k} beams', 'greedy'):.2f} "
                f"(its forward pass {ratio(timings, f'batch of {k}', 'greedy'):.2f})"
                for k in BEAMS[1:]
            )
            + "."
        )

    report.table(f"Steps after a prompt of {length}, mean of {new}", cases, shows, extra, idea="beam search")


if __name__ == "__main__":
    main()
