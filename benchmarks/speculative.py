"""Speculative decoding against plain decoding: a real pair, drafts of a given acceptance rate, and n-gram drafts.

    python -m benchmarks.speculative
    python -m benchmarks.speculative --models gpt2-large --acceptance 0.7,0.8

"gain" is the tokens per second after the prompt, as a multiple of plain decoding's in the same table. Texts are sampled
at temperature 0.7 and the default top-p unless a row says otherwise.

1. The bundled pair, fairytale drafted by distilfairytale, on the first words of stories: the acceptance rate and speed
   that it has, under each rule. "% accepted" counts all drafts; with k=1 each draft is the first of its pass.
2. Models of a shape, drafted by one of distilgpt2's shape: cheap drafts for a large target, dear ones for a small one.
   The acceptance rate is set, from 0 to 1. With --quick the bundled pair replaces the shapes.
3. N-gram drafts for the first of the targets, on a text that copies its prompt, on a fresh text without any repeated
   token, and on one that shuffles its prompt's tokens, for which most drafts are wrong.

Random weights accept almost no drafts and copy nothing. So in 2 and 3 the models compute in full, and then their logits
are made certain of a given text's next token. The draft is made certain of another token for a share of the text, drawn
at random: it pays its real cost, and its acceptance rate is known.
"""

import argparse

import numpy as np

from benchmarks.harness import SHAPES, Report, parser, random_model, ratio
from minigen import SpeculationConfig, generate, load

SECONDS = {"quick": 12, "full": 1500}
PROMPT = 128
DRAFT = "distilgpt2"
SAMPLING = {"temperature": 0.7}
STORIES = """Once upon a time
The little fox was hungry.
Tom and his sister went to the park.
One day, a big storm came.
Lily had a red balloon.
In a small house by the sea lived an old man.
The king had three daughters.
Ben found a shiny stone in the garden.
It was a cold winter morning.
There was a dragon who was afraid of""".splitlines()


def supported(name, *values):
    """The values that this version accepts for an option of speculation."""
    accepted = []
    for value in values:
        try:
            SpeculationConfig(**{name: value})
            accepted.append(value)
        except (TypeError, ValueError):
            pass
    return accepted


# The names of the rules as options of `generate`; the default rule is the first.
RULES = [{"speculation_rule": rule} for rule in supported("speculation_rule", "coupled", "rejection")] or [{}]


def seconds_per_token(completions):
    """Seconds per token after the prompt, whose pass gives plain decoding its first token, and speculation none."""
    seconds = sum(done.timings.seconds for done in completions)
    return seconds / sum(done.timings.tokens - (done.speculation is None) for done in completions)


def tokens_per_pass(completions):
    if completions[0].speculation is None:
        return 1.0
    return sum(done.timings.tokens for done in completions) / sum(x.speculation.target_passes for x in completions)


def gains_sentence(gains):
    """{row: {length: gain}} in words: the best of each row, and "auto" against plain decoding and the fixed lengths."""
    best = "Best gains: " + ", ".join(f"{max(row.values()):.2f} ({name})" for name, row in gains.items())
    auto = [
        (row["auto"], max(gain for k, gain in row.items() if k != "auto")) for row in gains.values() if "auto" in row
    ]
    if not auto:
        return f"{best}."
    against_fixed = min(gain / fixed for gain, fixed in auto)
    return (
        f'{best}; "auto" reaches at worst {min(auto)[0]:.2f} of plain decoding and {against_fixed:.2f} of the best k.'
    )


# ---------------------------------------------------------------------------------------- a real pair


def measure_pair(report):
    lengths = (1, "auto") if report.quick else (1, 2, 4, "auto")
    stories, new = (STORIES[:2], 16) if report.quick else (STORIES, 64)
    (model, tokenizer), draft = load("fairytale"), load("distilfairytale")
    asked, results = {}, {}
    # Greedy texts are the same under either rule.
    for temperature, rules in ((0.7, RULES), (0, RULES[:1])):
        asked[temperature, "-", "plain"] = {"temperature": temperature}
        for rule in rules:
            for k in lengths:
                options = {"temperature": temperature, "draft_model": draft, "num_draft_tokens": k, **rule}
                asked[temperature, rule.get("speculation_rule", "default"), k] = options

    def run(case):
        results[case] = []
        for seed, story in enumerate(stories):
            results[case] += generate(model, tokenizer, story, max_tokens=new, seed=seed, **asked[case])
        return seconds_per_token(results[case])

    def gain(case, timings):
        return ratio(timings, (case[0], "-", "plain"), case)

    def accepted(case):
        stats = [done.speculation for done in results[case]]
        return 100 * sum(x.accepted for x in stats) / max(1, sum(x.drafted for x in stats))

    def rows(timings):
        return [
            {
                "temperature": str(case[0]),
                "rule": case[1],
                "k": case[2],
                "% accepted": accepted(case) if case[2] != "plain" else "-",
                "tokens/pass": tokens_per_pass(results[case]),
                "tokens/s": 1000 / timing.median,
                "gain": gain(case, timings),
            }
            for case, timing in timings.items()
        ]

    def shows(timings):
        first = ", ".join(f"{accepted(case):.1f} % ({case[1]} rule)" for case in asked if case[0] and case[2] == 1)
        gains = {}
        for case in asked:
            if case[2] != "plain":
                gains.setdefault(f"temperature {case[0]}, {case[1]} rule", {})[case[2]] = gain(case, timings)
        return f"First drafts accepted at temperature 0.7: {first}. {gains_sentence(gains)}"

    cases = {case: lambda case=case: run(case) for case in asked}
    title = f"fairytale drafted by distilfairytale, {len(stories)} stories of {new} tokens"
    report.table(title, cases, shows, rows=rows, idea="speculative decoding, bundled pair")


# ---------------------------------------------------------------------------------------- models that follow a text


class Scripted:
    """A model that computes in full and then is certain of the next token of `script`, a list of ids."""

    script = None

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        rows = logits.reshape(-1, logits.shape[-1])  # a view: [1, V] or [1, T, V] -> [places, V]
        end = int(cache.length[0]) + 1
        rows[np.arange(len(rows)), self.script[end - len(rows) : end]] = 1000
        return logits


def scripted(name):
    """(`Scripted` of random weights of a shape or of a bundled model, tokenizer)."""
    model, tokenizer = random_model(name) if name in SHAPES else load(name)
    return Scripted(model), tokenizer


def fresh_ids(config, count):
    """Different ids, none of which ends a text, in a random order."""
    ids = np.setdiff1d(np.arange(config.vocab_size), config.eos_ids)
    return np.random.default_rng(0).permutation(ids)[:count].tolist()


def follow(target, tokenizer, text, **options):
    """The completions of a text's prompt, which are the rest of the text."""
    target.script = text
    done = generate(target, tokenizer, [text[:PROMPT]], max_tokens=len(text) - PROMPT, seed=0, **options, **SAMPLING)
    if done[0].token_ids != text[PROMPT:]:
        raise RuntimeError("the model did not write the text that its logits are certain of")
    return done


def draft_script(text, acceptance):
    """The text that a draft is certain of, in which so large a share of the tokens after the prompt is right."""
    rest = np.array(text[PROMPT:])
    right = np.random.default_rng(0).permutation(np.arange(len(rest)) < round(acceptance * len(rest)))
    return text[:PROMPT] + np.where(right, rest, np.roll(rest, 1)).tolist()  # all tokens differ, so this is another


def gain_table(report, title, texts, lengths, run, label, idea):
    """A row for each text with the gain of each length; run: (the text's name, k or "plain") -> seconds per token."""
    cases = {"plain": lambda: run(next(iter(texts)), "plain")}  # takes the same time for every text
    cases |= {(text, k): lambda text=text, k=k: run(text, k) for text in texts for k in lengths}

    def gains(timings):
        return {f"{label} {text}": {k: ratio(timings, "plain", (text, k)) for k in lengths} for text in texts}

    def rows(timings):
        plain = {"plain tokens/s": 1000 / timings["plain"].median}
        return [
            {"": name, **plain, **{f"gain k={k}": gain for k, gain in row.items()}}
            for name, row in gains(timings).items()
        ]

    report.table(title, cases, lambda timings: gains_sentence(gains(timings)), rows=rows, idea=idea)


def measure_acceptance(report, name, target, draft_name, draft, tokenizer, acceptances, new):
    text = fresh_ids(target.config, PROMPT + new)

    def run(acceptance, k):
        if k == "plain":
            return seconds_per_token(follow(target, tokenizer, text))
        draft.script = draft_script(text, acceptance)
        options = {"draft_model": (draft, tokenizer), "num_draft_tokens": k}
        return seconds_per_token(follow(target, tokenizer, text, **options))

    lengths = (1, 4, "auto") if report.quick else (1, 2, 4, 8, "auto")
    title = f"{name} drafted by {draft_name}, {new} tokens, by acceptance rate"
    idea = f"speculative decoding, {name} by {draft_name}"
    gain_table(report, title, acceptances, lengths, run, "acceptance", idea)


def measure_ngrams(report, name, target, tokenizer, new):
    text = fresh_ids(target.config, PROMPT + new)
    prompt = text[:PROMPT]
    texts = {
        "copied": prompt + np.resize(prompt, new).tolist(),
        "fresh": text,
        "shuffled": prompt + np.random.default_rng(0).choice(prompt, new).tolist(),
    }

    def run(kind, k):
        options = {} if k == "plain" else {"prompt_lookup_num_tokens": k}
        return seconds_per_token(follow(target, tokenizer, texts[kind], **options))

    lengths = supported("prompt_lookup_num_tokens", *((4, "auto") if report.quick else (2, 4, 8, "auto")))
    gain_table(report, f"{name} with n-gram drafts, {new} tokens", texts, lengths, run, "text", "n-gram drafts")


# ---------------------------------------------------------------------------------------- the script


def acceptance_list(text):
    values = [float(value) for value in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: each acceptance rate must be from 0 to 1")
    return values


def model_list(text):
    for name in text.split(","):
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(SHAPES)}")
    return text.split(",")


def main(arguments=None):
    options = parser(__doc__, repetitions=2, model=False)
    options.add_argument(
        "--models", type=model_list, metavar="SHAPES", help="shapes of the targets, gpt2,gpt2-large by default"
    )
    options.add_argument(
        "--acceptance", type=acceptance_list, metavar="A,A", help="acceptance rates, 0,0.5,0.7,0.8,0.9,1 by default"
    )
    arguments = options.parse_args(arguments)
    quick = arguments.quick
    report = Report("Speculative decoding against plain decoding, float32", arguments, SECONDS)
    measure_pair(report)
    names, draft_name, new = arguments.models or ["gpt2", "gpt2-large"], DRAFT, 48
    if quick and not arguments.models:
        names, draft_name, new = ["fairytale"], "distilfairytale", 16
    acceptances = arguments.acceptance or ([0.0, 0.7, 1.0] if quick else [0.0, 0.5, 0.7, 0.8, 0.9, 1.0])
    draft, _ = scripted(draft_name)
    for name in names:
        target = None  # frees the last one before the next is made
        target, tokenizer = scripted(name)
        measure_acceptance(report, name, target, draft_name, draft, tokenizer, acceptances, new)
        if name == names[0]:
            measure_ngrams(report, name, target, tokenizer, new)


if __name__ == "__main__":
    main()
