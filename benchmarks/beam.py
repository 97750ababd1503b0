"""Steps of beam search, as multiples of a greedy step.

    python -m benchmarks.beam --shape gpt2

Every case continues the same prompt of 128 random tokens. A step is everything from one token to the next: the choice
of candidates, the new order of the cache's rows, and the forward pass, whose time alone `decode` shows as "batch of k".
"""

from benchmarks.harness import Report, load_model, model_of, name_of, parser, random_ids, ratio
from minigen import generate

SECONDS = {"quick": 1, "full": 90}
PROMPT = 128


def main(arguments=None):
    arguments = parser(__doc__, repetitions=5).parse_args(arguments)
    report = Report(f"Beam search of {name_of(model_of(arguments))}, float32", arguments, SECONDS)
    model, tokenizer = load_model(model_of(arguments))
    new = 8 if report.quick else 64
    prompt = random_ids(model.config, min(PROMPT, model.config.n_positions - new)).tolist()
    options = {"greedy": {"temperature": 0}, "4 beams": {"num_beams": 4}, "8 beams": {"num_beams": 8}}

    def step(case):
        (done,) = generate(model, tokenizer, [prompt], max_tokens=new, ignore_eos=True, **options[case])
        return done.timings.seconds / (done.timings.tokens - 1)  # the first token follows from the prompt's pass

    def extra(case, timings):
        return {"against greedy": ratio(timings, case, "greedy")}

    def shows(timings):
        four, eight = (ratio(timings, case, "greedy") for case in ("4 beams", "8 beams"))
        return f"A step with 4 beams takes {four:.2f} times as long as a greedy step, with 8 beams {eight:.2f} times."

    cases = {case: lambda case=case: step(case) for case in options}
    report.table(f"Steps after a prompt of {len(prompt)}, mean of {new}", cases, shows, extra, idea="beam search")


if __name__ == "__main__":
    main()
