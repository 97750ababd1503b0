"""What speculative decoding gains over plain decoding: with a real pair, by acceptance, and from the text itself.

    python -m benchmarks.speculative --plot gain.png
    python -m benchmarks.speculative --models gpt2-large --acceptance 0.7,0.8

With --quick the bundled pair takes the place of the shapes.

Four tables. "gain" is always tokens a second, after the prompt, as a multiple of plain decoding's in the same table;
everything is sampled at temperature 0.7 and the default top-p.

1. The bundled pair, fairytale drafted by distilfairytale, on the beginnings of stories: its real acceptance. "%
   accepted" is of all drafts, those after a rejection included; for 1 draft it is the acceptance itself.
2. What a pass costs for each shape, drafted by the shape of distilgpt2, after a prompt of 128: a draft step, and a pass
   of the target that checks k drafts and chooses k + 1 tokens, as multiples of a plain step.
3. The gain for each acceptance a, with the best k by table 2. "predicted" is the mean number of tokens a round gives
   over what the round costs by table 2: (1 - a^(k+1)) / (1 - a) / (k * draft + pass). "gain" is that of the real loop.
   "loses at k" lists the k whose predicted gain is below 1.
4. Drafts from the text itself, for the first of the shapes: on a text that copies its prompt, on one that never comes
   back to a token, where every look-up is in vain, and on one that shuffles its prompt's tokens, where nearly every
   draft is wrong.

Random weights accept next to no draft, and copy nothing. So in 2 to 4 the models compute in full, and then the logits
are made certain of the next token of a given text: the target of the text itself, the draft of the same but for some
tokens, chosen by lot, where it is certain of another. Costs are real, and so is the loop; acceptance is as ordered.
Choosing a token costs what it does where a model is sure of itself.
"""

import argparse
import time

import numpy as np

from benchmarks.harness import PAUSE, SHAPES, columns, gpt2_tokenizer, measure, parser, plot, random_parameters, report
from minigen import GPT2, GPT2Config, History, SamplingConfig, draw, generate, load, probs

PROMPT = 128
MOST = 8  # drafts a round, at most
DRAFT = "distilgpt2"
SAMPLING = {"temperature": 0.7}
TARGETS = {("gpt2-large", 0.7): "1.6", ("gpt2-large", 0.8): "1.9", "copies": "2.5"}
STORIES = [
    "Once upon a time",
    "The little fox was hungry.",
    "Tom and his sister went to the park.",
    "One day, a big storm came.",
    "Lily had a red balloon.",
    "In a small house by the sea lived an old man.",
    '"Can I help you?" asked the bird.',
    "The king had three daughters.",
    "Ben found a shiny stone in the garden.",
    "It was a cold winter morning.",
    "Mum made a cake for",
    "There was a dragon who was afraid of",
]


def per_token(completions):
    """Seconds a token after the prompt. Plain decoding has its first token from the prompt's pass, speculation not."""
    seconds = sum(done.timings.seconds for done in completions)
    return seconds / sum(done.timings.tokens - (done.speculation is None) for done in completions)


def tokens_per_pass(completions):
    if completions[0].speculation is None:
        return 1.0
    return sum(done.timings.tokens for done in completions) / sum(x.speculation.target_passes for x in completions)


def gain_of(timings, name):
    return timings["plain"].median / timings[name].median


# ---------------------------------------------------------------------------------------- a real pair


def bundled_pair(quick, repetitions):
    """Rows of table 1."""
    lengths = (1, 4, "auto") if quick else (1, 2, 3, 4, 5, 6, "auto")
    stories, new = (STORIES[:2], 16) if quick else (STORIES, 100)
    (model, tokenizer), draft = load("fairytale"), load("distilfairytale")
    results = {}

    def run(k):
        options = {} if k == "plain" else {"draft_model": draft, "num_draft_tokens": k}
        results[k] = []
        for seed, story in enumerate(stories):
            results[k] += generate(model, tokenizer, story, max_tokens=new, seed=seed, **options, **SAMPLING)
        return per_token(results[k])

    timings = measure({k: lambda k=k: run(k) for k in ("plain", *lengths)}, repetitions, min(1, repetitions - 1))
    rows = []
    for k, timing in timings.items():
        stats = [done.speculation for done in results[k]]
        accepted = "-"
        if k != "plain":
            accepted = 100 * sum(x.accepted for x in stats) / max(1, sum(x.drafted for x in stats))
        rows.append(
            {
                "fairytale by distilfairytale": k if k == "plain" else f"k={k}",
                "tokens": sum(done.timings.tokens for done in results[k]),
                "% accepted": accepted,
                "tokens/pass": tokens_per_pass(results[k]),
                "tokens/s": 1000 / timing.median,
                "gain": gain_of(timings, k),
            }
        )
    return rows


# ---------------------------------------------------------------------------------------- models that follow a text


class Scripted:
    """A model that computes in full, and then is certain of what `script`, a list of ids, has at each place."""

    script = None

    def __init__(self, model, pause):
        self.model, self.config, self.new_cache = model, model.config, model.new_cache
        self.pause = pause

    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        rows = logits.reshape(-1, logits.shape[-1])  # a view: [1, V] or [1, T, V] -> [places, V]
        next_place = cache.length[0]
        rows[np.arange(len(rows)), self.script[next_place - len(rows) + 1 : next_place + 1]] = 1000
        if np.shape(ids)[1] > 2 * MOST:  # a prompt; what follows it is timed
            time.sleep(self.pause)
        return logits


def scripted(name, pause):
    """A `Scripted` of a shape's random weights, or of a bundled model."""
    if name not in SHAPES:
        return Scripted(load(name)[0], pause)
    config = GPT2Config(**SHAPES[name])
    return Scripted(GPT2(config, random_parameters(config)), pause)


def random_ids(config, count):
    """Different ids, none of which ends a text, in a random order."""
    ids = np.setdiff1d(np.arange(config.vocab_size), config.eos_ids)
    return np.random.default_rng(0).permutation(ids)[:count].tolist()


def n_rounds(right, k):
    """The passes that speculation takes for a text whose tokens the draft has `right` or not."""
    place = rounds = 0
    while place < len(right):
        wrong = np.flatnonzero(~right[place : place + k])
        place += (wrong[0] if len(wrong) else k) + 1
        rounds += 1
    return rounds


def cast_lots(acceptance, k, count):
    """bool [count]: the tokens of a text that the draft is to have right, each with this probability.

    A few dozen rounds may be lucky ones, so of many lots those are taken whose tokens a pass come nearest the mean.
    """
    rng = np.random.default_rng(0)
    lots = rng.random((200, count)) < acceptance
    return min(lots, key=lambda right: abs(count / n_rounds(right, k) - mean_tokens(acceptance, k)))


def mean_tokens(acceptance, k):
    """What a round of k drafts gives on average (Leviathan et al. 2023, equation 1)."""
    return sum(acceptance**i for i in range(k + 1))


# ---------------------------------------------------------------------------------------- gain by acceptance


def measure_costs(target, draft, text, repetitions):
    """ "step", "draft" and k = 1 .. MOST -> `Timing` of one pass at the end of the prompt, its tokens chosen.

    In the loop no token is chosen after a rejection; here all are.
    """
    prompt, rest = text[:PROMPT], text[PROMPT:]
    history, sampling, rng = History(prompt, PROMPT), SamplingConfig(**SAMPLING), np.random.default_rng(0)

    caches = {model: model.new_cache(1, PROMPT + MOST + 1) for model in (target, draft)}
    for model, cache in caches.items():
        model.script = text
        model.forward([prompt], cache)

    def run(model, places):
        for logits in model.forward([rest[:places]], caches[model], last_only=False)[0]:
            draw(probs(logits, history, sampling), rng)
        caches[model].truncate(PROMPT)

    cases = {"step": lambda: run(target, 1), "draft": lambda: run(draft, 1)}
    cases |= {k: lambda k=k: run(target, k + 1) for k in range(1, MOST + 1)}
    return measure(cases, repetitions)


def by_acceptance(name, target, draft, tokenizer, acceptances, new, repetitions):
    """(rows of table 2, rows of table 3) for one target."""
    text = random_ids(target.config, PROMPT + new)
    costs = measure_costs(target, draft, text, 5 * repetitions)
    ratio = {case: timing.median / costs["step"].median for case, timing in costs.items()}
    cost_rows = [
        {
            "model": name,
            "pass": f"check {case}" if case in range(1, MOST + 1) else case,
            **columns(timing),
            "steps": ratio[case],
        }
        for case, timing in costs.items()
    ]

    predicted = {
        a: {k: mean_tokens(a, k) / (k * ratio["draft"] + ratio[k]) for k in range(1, MOST + 1)} for a in acceptances
    }
    best = {a: max(gains, key=gains.get) for a, gains in predicted.items()}
    scripts = {}
    for a, k in best.items():
        right = cast_lots(a, k, new)
        # Any other token of the text is a wrong one.
        wrong = np.roll(text[PROMPT:], 1)
        scripts[a] = text[:PROMPT] + np.where(right, text[PROMPT:], wrong).tolist()
    results = {}

    def run(a):
        options = {}
        if a != "plain":
            draft.script = scripts[a]
            options = {"draft_model": (draft, tokenizer), "num_draft_tokens": best[a]}
        results[a] = follow(target, tokenizer, text, **options)
        return per_token(results[a])

    timings = measure({a: lambda a=a: run(a) for a in ("plain", *acceptances)}, repetitions, min(1, repetitions - 1))
    gain_rows = []
    for a in acceptances:
        losing = [str(k) for k, gain in predicted[a].items() if gain < 1]
        gain_rows.append(
            {
                "model": name,
                "acceptance": a,
                "best k": best[a],
                "tokens/pass": tokens_per_pass(results[a]),
                "plain tokens/s": 1000 / timings["plain"].median,
                "tokens/s": 1000 / timings[a].median,
                "predicted": predicted[a][best[a]],
                "gain": gain_of(timings, a),
                "target": TARGETS.get((name, a), "-"),
                "loses at k": ",".join(losing) or "-",
                "verdict": "gains" if gain_of(timings, a) >= 1 else "LOSES",
            }
        )
    return cost_rows, gain_rows


def follow(target, tokenizer, text, **options):
    """The completions of a text's prompt, which are the rest of the text."""
    target.script = text
    done = generate(target, tokenizer, [text[:PROMPT]], max_tokens=len(text) - PROMPT, seed=0, **options, **SAMPLING)
    if done[0].token_ids != text[PROMPT:]:
        raise RuntimeError("the text is not the one that the target was made certain of")
    return done


# ---------------------------------------------------------------------------------------- drafts from the text itself


def from_the_text(name, target, tokenizer, new, lengths, repetitions):
    """Rows of table 4."""
    ids = random_ids(target.config, PROMPT + new)
    prompt = ids[:PROMPT]
    texts = {
        "copies": prompt + np.resize(prompt, new).tolist(),
        "never repeats": ids,
        "shuffles": prompt + np.random.default_rng(0).choice(prompt, new).tolist(),
    }
    results = {}

    def run(kind, k):
        results[kind, k] = follow(target, tokenizer, texts[kind], prompt_lookup_num_tokens=k)
        return per_token(results[kind, k])

    # Plain decoding is the same for any text.
    cases = {"plain": lambda: run("copies", 0)}
    cases |= {(kind, k): lambda kind=kind, k=k: run(kind, k) for kind in texts for k in lengths}
    timings = measure(cases, repetitions, min(1, repetitions - 1))
    return [
        {
            "model": name,
            "text": kind,
            "look-up": k,
            "tokens/pass": tokens_per_pass(results[kind, k]),
            "plain tokens/s": 1000 / timings["plain"].median,
            "tokens/s": 1000 / timings[kind, k].median,
            "gain": gain_of(timings, (kind, k)),
            "target": TARGETS.get(kind, "-"),
        }
        for kind in texts
        for k in lengths
    ]


# ---------------------------------------------------------------------------------------- the script


def acceptance_list(text):
    values = [float(value) for value in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} holds something that is not from 0 to 1")
    return values


def model_list(text):
    names = text.split(",")
    for name in names:
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(SHAPES)}")
    return names


def draw_gains(rows, file):
    """Gain against acceptance, a line a model, measured and predicted."""
    with plot(file, "speculation: gain by acceptance") as (axes,):
        for number, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
            shown = sorted((row for row in rows if row["model"] == name), key=lambda row: row["acceptance"])
            at = [row["acceptance"] for row in shown]
            axes.plot(at, [row["gain"] for row in shown], "o-", color=f"C{number}", label=name)
            axes.plot(at, [row["predicted"] for row in shown], ":", color=f"C{number}")
        axes.axhline(1, color="0.7")
        axes.set_xlabel("acceptance (dotted: predicted)")
        axes.set_ylabel("tokens a second / plain decoding")
        axes.legend()


def main():
    options = parser(__doc__.splitlines()[0], repetitions=3, plot=True)
    names = ["gpt2", "gpt2-medium", "gpt2-large"]
    options.add_argument(
        "--models", type=model_list, default=names, metavar="SHAPES", help="shapes of the targets; not with --quick"
    )
    acceptances = [0.5, 0.6, 0.7, 0.8, 0.9]
    options.add_argument(
        "--acceptance", type=acceptance_list, default=acceptances, metavar="A,A", help="rows of the third table"
    )
    arguments = options.parse_args()
    quick = arguments.quick
    repetitions, new, pause = (1, 16, 0) if quick else (arguments.repetitions, 96, PAUSE)
    names, draft_name = (["fairytale"], "distilfairytale") if quick else (arguments.models, DRAFT)
    tokenizer = load("fairytale")[1] if quick else gpt2_tokenizer()

    rows = bundled_pair(quick, repetitions)
    draft = scripted(draft_name, pause)
    costs, gains = [], []
    for name in names:
        target = None  # the last one makes room before the next is made
        target = scripted(name, pause)
        both = by_acceptance(name, target, draft, tokenizer, arguments.acceptance, new, repetitions)
        costs += both[0]
        gains += both[1]
        if name == names[0]:
            lengths, copied = ((4,), 16) if quick else ((2, 4, 8), PROMPT)
            looked_up = from_the_text(name, target, tokenizer, copied, lengths, repetitions)
    rows += costs + gains + looked_up
    notes = [f"prompt {PROMPT}, then {new} tokens in the third table, {copied} in the fourth"]
    report("speculative decoding against plain decoding", rows, arguments, notes)
    if arguments.plot:
        draw_gains(gains, arguments.plot)


if __name__ == "__main__":
    main()
