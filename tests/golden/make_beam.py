"""Golden beam searches by transformers' generate: float32, CPU, no sampling.

    python -m tests.golden.make_beam

A search whose outcome hangs on rounding is not stored, and the next seed takes its place: where two candidates, two
finished texts, or the two sides of the stopping rule come closer than MARGIN, or where the same search with float64
weights finds other texts.

transformers applies a bias before the repetition penalty, minigen after it; the processors are therefore handed over
as a list in minigen's order, all of them transformers' own.

beam.json: the models (null weights: the bundled one of that name) and, a line for each case, its model, end-of-text
ids, prompts and options, under minigen's names. `batched` tells that transformers ran the prompts as one batch.
beam.npz: the found texts of all cases one after the other, num_return_sequences for each prompt, best first
  lengths  int16 [n]      generated tokens of each text
  ids      int16 [sum]    the generated tokens of all texts
  scores   float32 [n]    sequences_scores
"""

import json
from pathlib import Path

import numpy as np

from tests.golden.make_logits import bundled_model, fingerprint, stored_params, torch_model
from tests.oracles.tiny import random_params, tiny_config

HERE = Path(__file__).parent
WEIGHTS = HERE.parent.parent / "weights"

# Beams go on in float32 in transformers and in float64 in minigen; sums of 24 terms differ by about 1e-5.
MARGIN = 5e-5

# name -> (config, standard deviation of the weights). The spreads give distributions from flat to very peaked.
TINY = {
    "flat": (tiny_config(n_positions=48, n_embd=16, n_head=4, n_layer=3), 0.25),
    "even": (tiny_config(n_positions=48, n_embd=16), 0.35),
    "peaked": (tiny_config(n_positions=48, n_embd=16, vocab_size=131, tie_word_embeddings=False), 0.5),
}
SEED = 11
TALES = [
    "Once upon a time there was a",
    "The little girl said to the wolf",
    "One day, a dog named Max",
    '"Open the door," said the king, and',
    "The",
    "In the middle of the forest stood a house in which nobody had lived for a hundred years. The boy",
    "They lived happily ever after.",
    "Lily had a red ball. She liked to",
    "Then the old witch cried:",
    "the prince and the princess and the prince and the princess and",
]
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
RULES = (False, True, "never")
BEAMS = range(2, 9)
# What the ids that end a text are: those of the best text without an end, so that it is cut short.
ENDS = ("early", "late", "never", "several", "early", "none", "late", "several")


class Unfit(Exception):
    """This search's outcome hangs on rounding."""


# ---- the search by transformers ----------------------------------------------------------------------------------


def watch_margins(model):
    """Make the model's beam search raise Unfit where two numbers that it compares are closer than MARGIN."""
    import torch

    candidates, update, check = (
        getattr(model, name)
        for name in ("_get_top_k_continuations", "_update_finished_beams", "_check_early_stop_heuristic")
    )

    def require_apart(values, factor=1.0):
        values = values[values > -1e8].sort().values  # transformers marks what cannot be chosen by -1e9
        if len(values) > 1 and values.diff().min() < MARGIN * max(1.0, factor):
            raise Unfit

    def watched_candidates(**arguments):
        for row in arguments["accumulated_log_probs"]:
            require_apart(torch.topk(row, arguments["beams_to_keep"] + 1).values)
        return candidates(**arguments)

    def watched_update(**arguments):
        ended = arguments["next_token_hits_stopping_criteria"] & arguments["top_num_beam_mask"][None]
        divisor = (arguments["cur_len"] + 1 - arguments["decoder_prompt_len"]) ** arguments["length_penalty"]
        for row, row_ended, scores in zip(arguments["topk_log_probs"], ended, arguments["beam_scores"], strict=True):
            require_apart(torch.cat([scores, row[row_ended] / divisor]), 1 / divisor)
        return update(**arguments)

    def watched_check(**arguments):
        length = arguments["cur_len"] - arguments["decoder_prompt_len"]
        if arguments["early_stopping"] == "never" and arguments["length_penalty"] > 0:
            length = arguments["max_length"] - arguments["decoder_prompt_len"]
        divisor = length ** arguments["length_penalty"]
        if arguments["early_stopping"] is not True:
            for running, scores in zip(arguments["running_beam_scores"], arguments["beam_scores"], strict=True):
                require_apart(torch.stack([running[0] / divisor, scores.min()]), 1 / divisor)
        return check(**arguments)

    model._get_top_k_continuations = watched_candidates
    model._update_finished_beams = watched_update
    model._check_early_stop_heuristic = watched_check
    return model


def search(model, prompts, eos_ids, options):
    """The texts that generate finds for prompts of equal length: lists of generated ids, and their scores."""
    import torch
    import transformers.generation.logits_process as hf
    from transformers import GenerationConfig

    n_prompt, processors = len(prompts[0]), []
    if "repetition_penalty" in options:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        processors.append(hf.NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if "logit_bias" in options:
        bias = {(token,): value for token, value in options["logit_bias"].items()}
        processors.append(hf.SequenceBiasLogitsProcessor(bias))
    if "min_tokens" in options:
        processors.append(hf.MinNewTokensLengthLogitsProcessor(n_prompt, options["min_tokens"], eos_ids))
    model.generation_config = GenerationConfig()
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            do_sample=False,
            num_beams=options["num_beams"],
            length_penalty=options["length_penalty"],
            early_stopping=options["early_stopping"],
            num_return_sequences=options.get("num_return_sequences", 1),
            max_new_tokens=options["max_tokens"],
            eos_token_id=eos_ids or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        ),
        logits_processor=hf.LogitsProcessorList(processors),
    )
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    rows = out.sequences[:, n_prompt:].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)], out.sequences_scores.tolist()


def golden(models, case):
    """(texts, scores) of a case, by the model in float32. Raises Unfit where the one in float64 finds other texts."""
    prompts = case["prompts"]
    groups = [prompts] if case["batched"] else [[prompt] for prompt in prompts]
    runs = []
    for model in models:
        texts, scores = [], []
        for group in groups:
            some_texts, some_scores = search(model, group, case["eos_ids"], case["options"])
            texts, scores = texts + some_texts, scores + some_scores
        runs.append((texts, scores))
    if runs[0][0] != runs[1][0]:
        raise Unfit
    return runs[0]


# ---- the cases ---------------------------------------------------------------------------------------------------


def some_options(rng, index, vocab_size, max_tokens):
    """Options under minigen's names; all beams, length penalties and stopping rules come in turn."""
    num_beams = BEAMS[index % 7]
    options = {
        "num_beams": num_beams,
        "length_penalty": PENALTIES[index // 7 % 5],
        "early_stopping": RULES[index // 35 % 3],
        "num_return_sequences": int(rng.integers(1, num_beams + 1)),
        "max_tokens": max_tokens,
    }
    if rng.random() < 0.3:
        options["repetition_penalty"] = float(rng.choice([0.7, 1.3, 2.0]))
    if rng.random() < 0.3:
        options["no_repeat_ngram_size"] = int(rng.integers(1, 4))
    if rng.random() < 0.3:
        tokens = rng.choice(vocab_size, 3, replace=False).tolist()
        options["logit_bias"] = dict(zip(tokens, [2.5, -3.0, -100.0], strict=True))
    return options


def some_eos_ids(rng, kind, text, vocab_size):
    """Ids that end a text, chosen from `text`, the best one without an end."""
    firsts = list(dict.fromkeys(text))  # each token, in the order in which they come up
    if kind == "none":
        return []
    if kind == "early":
        return [firsts[rng.integers(min(2, len(firsts)))]]
    if kind == "late":
        return [firsts[-1]]
    others = [token for token in range(vocab_size) if token not in text]
    if kind == "never":
        return [int(rng.choice(others))]
    chosen = {firsts[-1], firsts[len(firsts) // 2], *rng.choice(others, rng.integers(1, 3), replace=False).tolist()}
    return [int(token) for token in rng.permutation(list(chosen))]


def make_case(models, name, prompts, rng, index, batched, max_tokens, vocab_size):
    options = some_options(rng, index, vocab_size, max_tokens)
    plain = {**options, "early_stopping": True, "num_return_sequences": 1}
    (text,), _ = search(models[0], [prompts[0]], [], plain)
    eos_ids = some_eos_ids(rng, ENDS[index % 8], text, vocab_size)
    if len(eos_ids) > 2 and rng.random() < 0.5:
        # All of them are likely then: of 2 * num_beams candidates too few would be left to go on with.
        options["logit_bias"] = dict.fromkeys(eos_ids, 5.0)
    if eos_ids and rng.random() < 0.3:
        options["min_tokens"] = int(rng.integers(1, max_tokens // 2 + 2))
    return {"model": name, "eos_ids": eos_ids, "batched": batched, "prompts": prompts, "options": options}


def load_case(line):
    """A case from beam.json: logit_bias is keyed by int again."""
    bias = line["options"].get("logit_bias")
    if bias:
        line["options"]["logit_bias"] = {int(token): value for token, value in bias.items()}
    return line


def outcome(case, text):
    """When the best text ended: early, late or never."""
    if text[-1] not in case["eos_ids"]:
        return "never"
    return "early" if 3 * len(text) <= case["options"]["max_tokens"] else "late"


def main(out_folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    notes, models = {}, {}
    for name, (config, std) in TINY.items():
        params = random_params(config, SEED, std)
        notes[name] = {"config": config, "seed": SEED, "std": std, "fingerprint": fingerprint(params)}
        single, double = torch_model(config, params), torch_model(config, params).double()
        models[name] = (watch_margins(single), watch_margins(double))
    folder = WEIGHTS / "fairytale"
    config = json.loads((folder / "config.json").read_text())
    notes["fairytale"] = {"config": config, "seed": None, "fingerprint": fingerprint(stored_params(folder))}
    models["fairytale"] = (watch_margins(bundled_model(folder)), watch_margins(bundled_model(folder).double()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tales = [tokenizer(tale)["input_ids"] for tale in TALES]

    # (model, number of prompts, whether as one batch); the indices run through all beams, penalties and rules.
    plan = [(list(TINY)[index % 3], 1, False) for index in range(315)]
    plan += [(list(TINY)[index % 3], 2 + index % 3, index % 2 == 0) for index in range(24)]
    plan += [("fairytale", 1 + (index % 8 == 7), False) for index in range(30)]

    cases, lengths, ids, scores, tried = [], [], [], [], 0
    counts = {}
    with torch.inference_mode():
        for number, (name, n_prompts, batched) in enumerate(plan):
            vocab_size = notes[name]["config"]["vocab_size"]
            for attempt in range(100):
                rng = np.random.default_rng([number, attempt])
                tried += 1
                if name == "fairytale":
                    max_tokens = int(rng.integers(6, 17))
                    prompts = [tales[(number + attempt + i) % len(tales)] for i in range(n_prompts)]
                else:
                    max_tokens = int(rng.integers(1, 21)) if rng.random() < 0.8 else 24
                    length = int(rng.integers(1, 13))
                    sizes = [length if batched else int(rng.integers(1, 13)) for _ in range(n_prompts)]
                    prompts = [rng.integers(vocab_size, size=size).tolist() for size in sizes]
                try:
                    # 11 is prime to 105, so that tales and batches meet all kinds of settings too.
                    index = number if number < 315 else 11 * number
                    case = make_case(models[name], name, prompts, rng, index, batched, max_tokens, vocab_size)
                    texts, found = golden(models[name], case)
                    break
                except Unfit:
                    continue
            else:
                raise RuntimeError(f"case {number}: no seed gives clear margins")
            cases.append(case)
            lengths += map(len, texts)
            ids += [token for text in texts for token in text]
            scores += found
            traits = [outcome(case, texts[0]), name, f"eos ids {len(case['eos_ids'])}", *case["options"]]
            traits += [f"{key} {case['options'][key]}" for key in ("num_beams", "length_penalty", "early_stopping")]
            for trait in traits:
                counts[trait] = counts.get(trait, 0) + 1
    for trait, count in sorted(counts.items()):
        print(f"{trait:28s} {count}")
    print(f"{len(cases)} cases, {tried - len(cases)} put aside, {len(lengths)} texts of 1 to {max(lengths)} tokens")
    for trait in ("early", "late", "never"):
        assert counts[trait] > 0.15 * len(cases), f"only {counts[trait]} best texts end {trait}"
    for trait in ("eos ids 0", "eos ids 1", "eos ids 3", "repetition_penalty", "logit_bias", "min_tokens"):
        assert counts[trait] > 0.08 * len(cases), f"only {counts[trait]} cases with {trait}"

    lines = ",\n".join(json.dumps(case) for case in cases)
    (out_folder / "beam.json").write_text(f'{{"models": {json.dumps(notes)},\n"cases": [\n{lines}\n]}}\n')
    np.savez_compressed(
        out_folder / "beam.npz",
        lengths=np.array(lengths, np.int16),
        ids=np.array(ids, np.int16),
        scores=np.array(scores, np.float32),
    )
    for file in ("beam.json", "beam.npz"):
        print(f"{file}: {(out_folder / file).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(HERE)
