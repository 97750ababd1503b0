"""Speculative decoding against plain decoding: a real pair, drafts of a given acceptance rate, and n-gram drafts.

    python -m benchmarks.speculative
    python -m benchmarks.speculative --models gpt2-large --acceptance 0.7 0.8

ms are per token after the prompt, k is the number of drafts for each pass of the target, "gain" is the speed as a
multiple of plain decoding's. "% accepted" counts all drafts; with k=1 each of them is the first of its pass.

1. The bundled pair, fairytale drafted by distilfairytale, with each rule.
2. Models of a given shape, drafted by one of distilgpt2's shape: cheap drafts for a large target, expensive drafts for
   a small one. The acceptance rate is given, from 0 to 1. With --quick the bundled pair replaces the shapes.
3. N-gram drafts for the first of the targets: on a text that copies its prompt, on a fresh text without any repeated
   token, and on one that shuffles its prompt's tokens, for which most drafts are wrong.

With random weights, almost no draft would be accepted, and nothing would be copied. So in 2 and 3 both models do all
their work, and then their logits are replaced: the target is made to choose the next token of a given text, and the
draft model to propose this token or, for a random share of the tokens, another one. So each draft has its real cost,
and the acceptance rate is known.
"""

import numpy as np

from benchmarks.harness import SHAPES, Report, load_model, parser, ratio
from minigen import generate, load

SECONDS = {"quick": 6, "full": 1800}
PROMPT = 128
STORIES = (
    "Once upon a time/The little fox was hungry./Tom and his sister went to the park./One day, a big storm came./"
    "Lily had a red balloon./In a small house by the sea lived an old man./The king had three daughters./"
    "Ben found a shiny stone in the garden./It was a cold winter morning./There was a dragon who was afraid of"
).split("/")


def compare(report, title, groups, lengths, write, idea):
    """A table of each group of texts: plain decoding, and then drafts of each length k with their gain.

    write: (group, k, or 0 for plain decoding) -> completions.
    """
    cases = {f"{group}, {f'k={k}' if k else 'plain'}": (group, k) for group in groups for k in (0, *lengths)}
    name = {pair: case for case, pair in cases.items()}
    results = {}

    def run(case):
        results[case] = write(*cases[case])
        # The prompt's pass gives plain decoding its first token, and speculation none.
        tokens = sum(done.timings.tokens - (done.speculation is None) for done in results[case])
        return sum(done.timings.seconds for done in results[case]) / tokens

    def gain(timings, group, k):
        return ratio(timings, name[group, 0], name[group, k])

    def extra(case, timings):
        stats = [done.speculation for done in results[case] if done.speculation]
        passes, drafted, accepted = (
            sum(getattr(x, field) for x in stats) for field in ("target_passes", "drafted", "accepted")
        )
        return {
            "tokens/s": 1000 / timings[case].median,
            "gain": gain(timings, *cases[case]),
            "% accepted": 100 * accepted / drafted if drafted else "-",
            "tokens/pass": sum(done.timings.tokens for done in results[case]) / passes if passes else 1.0,
        }

    def shows(timings):
        best = {group: max(gain(timings, group, k) for k in lengths) for group in groups}
        return "Best gains: " + ", ".join(f"{gain:.2f} ({group})" for group, gain in best.items()) + "."

    report.table(title, {case: lambda case=case: run(case) for case in cases}, shows, extra, idea)


def measure_pair(report):
    lengths = (1, 4) if report.quick else (1, 2, 4)
    stories, new = (STORIES[:2], 16) if report.quick else (STORIES, 64)
    (model, tokenizer), draft = load("fairytale"), load("distilfairytale")
    groups = {f"temperature 0.7, {rule}": (0.7, rule) for rule in ("coupled", "rejection")}
    groups["temperature 0"] = 0, "coupled"  # the texts are the same with either rule

    def write(group, k):
        temperature, rule = groups[group]
        options = {"draft_model": draft, "num_draft_tokens": k, "speculation_rule": rule} if k else {}
        options |= {"temperature": temperature, "max_tokens": new}
        return [generate(model, tokenizer, x, seed=i, **options)[0] for i, x in enumerate(stories)]

    title = f"fairytale drafted by distilfairytale, {len(stories)} stories of {new} tokens"
    compare(report, title, groups, lengths, write, "speculative decoding, bundled pair")


class Scripted:
    """A model that computes in full and then is certain of the next token of `script`, a list of ids."""

    script = None

    def __init__(self, name):
        self.model, self.tokenizer = load_model(name)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        rows = logits.reshape(-1, logits.shape[-1])  # a view: [1, V] or [1, T, V] -> [places, V]
        end = int(cache.length[0]) + 1
        rows[np.arange(len(rows)), self.script[end - len(rows) : end]] = 1000
        return logits


def fresh_ids(config, count):
    """Different ids, none of which ends a text, in a random order."""
    ids = np.setdiff1d(np.arange(config.vocab_size), config.eos_ids)
    return np.random.default_rng(0).permutation(ids)[:count].tolist()


def follow(target, text, **options):
    """The completions of a text's prompt, which are the rest of the text."""
    target.script = text
    options |= {"max_tokens": len(text) - PROMPT, "temperature": 0.7, "seed": 0}
    done = generate(target, target.tokenizer, [text[:PROMPT]], **options)
    if done[0].token_ids != text[PROMPT:]:
        raise RuntimeError("the model did not write the text that its logits are certain of")
    return done


def draft_script(text, acceptance):
    """The text that a draft is certain of: so large a share of the tokens after the prompt is right."""
    rest = np.array(text[PROMPT:])
    right = np.random.default_rng(0).permutation(np.arange(len(rest)) < round(acceptance * len(rest)))
    return text[:PROMPT] + np.where(right, rest, np.roll(rest, 1)).tolist()  # all tokens differ, so this is another


def measure_acceptance(report, name, target, draft_name, draft, acceptances, new):
    text = fresh_ids(target.config, PROMPT + new)
    groups = {f"acceptance {a:g}": draft_script(text, a) for a in acceptances}

    def write(group, k):
        draft.script = groups[group]
        options = {"draft_model": (draft, draft.tokenizer), "num_draft_tokens": k} if k else {}
        return follow(target, text, **options)

    lengths = (1, 4) if report.quick else (1, 2, 4, 8)
    title = f"{name} drafted by {draft_name}, {new} tokens, by acceptance rate"
    compare(report, title, groups, lengths, write, f"speculative decoding, {name} by {draft_name}")


def measure_ngrams(report, name, target, new):
    fresh = fresh_ids(target.config, PROMPT + new)
    prompt = fresh[:PROMPT]
    shuffled = np.random.default_rng(0).choice(prompt, new).tolist()
    groups = {"copied": prompt + np.resize(prompt, new).tolist(), "fresh": fresh, "shuffled": prompt + shuffled}

    def write(group, k):
        return follow(target, groups[group], prompt_lookup_num_tokens=k)

    lengths = (4,) if report.quick else (2, 4, 8)
    compare(report, f"{name} with n-gram drafts, {new} tokens", groups, lengths, write, "n-gram drafts")


def main(arguments=None):
    options = parser(__doc__, repetitions=2, model=False)
    options.add_argument("--models", nargs="+", choices=SHAPES, help="the targets; gpt2 gpt2-large by default")
    options.add_argument("--acceptance", nargs="+", type=float, metavar="A", help="by default 0 0.5 0.7 0.8 0.9 1")
    arguments = options.parse_args(arguments)
    if not all(0 <= acceptance <= 1 for acceptance in arguments.acceptance or []):
        options.error(f"argument --acceptance: {arguments.acceptance} are not all from 0 to 1")
    report = Report("Speculative decoding against plain decoding, float32", arguments, SECONDS)
    measure_pair(report)
    names, draft_name, new = arguments.models or ["gpt2", "gpt2-large"], "distilgpt2", 48
    if report.quick and not arguments.models:
        names, draft_name, new = ["fairytale"], "distilfairytale", 16
    acceptances = arguments.acceptance or ([0, 0.7, 1] if report.quick else [0, 0.5, 0.7, 0.8, 0.9, 1])
    draft = Scripted(draft_name)
    for name in names:
        target = None  # frees the last one before the next is made
        target = Scripted(name)
        measure_acceptance(report, name, target, draft_name, draft, acceptances, new)
        if name == names[0]:
            measure_ngrams(report, name, target, new)


if __name__ == "__main__":
    main()
