"""Golden scores by transformers' GPT2LMHeadModel: float32, CPU, eager attention.

The loop is that of its documentation, "Perplexity of fixed-length models", with one correction. The documentation gives
each window's mean loss the weight "targets - 1", for the first label that the model's shift drops. But the shift drops
a target only where all of a window's tokens are targets: later windows lose none, and weigh one token too little.
Here the tokens are counted after the shift; the documentation's own figure stands beside it.

score.npz: per text <text>/ids int64 [T], and per case <text>/<stride>/logprobs float32 [T], NaN where not scored.
score.json: per case n_tokens, the mean loss in nats and the perplexity,
counted (`nll_per_token`, `perplexity`) and as documented (`documented_perplexity`).
"""

import json
import math
from pathlib import Path

import numpy as np

from tests.oracles.tiny import random_params, tiny_config

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"
TINY, TINY_STD, TINY_SEED = tiny_config(), 0.5, 11
SENTENCES = (
    "Once upon a time there was a miller who had three sons and a grey cat. ",
    "The youngest of them walked into the forest, for he wanted to see the king's castle. ",
    '"Who is there?" asked the old woman, and she opened the door a little. ',
    "The fox laughed so much that he fell into the river.\n\n",
    "In the morning the snow was gone — and so was the golden key. ",
    "Nobody knew where the little girl had come from. ",
    "They danced and ate and drank, and if they have not stopped, they are dancing still. ",
)
STRIDES = {  # text -> strides
    "tiny-short": (None, 3),
    "tiny-context": (1, 16),
    "tiny-long": (1, 5, 8, 15, 16),
    "fairytale-short": (None,),
    "fairytale-long": (60, 256, 512),
}


def tale(n_sentences: int) -> str:
    """So many sentences, in an order of their own."""
    order = np.random.default_rng(5).integers(0, len(SENTENCES), n_sentences)
    return "".join(SENTENCES[i] for i in order)


TALES = {"fairytale-short": tale(2), "fairytale-long": tale(34)}
TINY_IDS = {
    name: np.random.default_rng(length).integers(0, TINY["vocab_size"], length)
    for name, length in (("tiny-short", 9), ("tiny-context", 16), ("tiny-long", 75))
}


def strided(model, ids, stride):
    """(log-probabilities [T], figures) of one text by the documentation's loop."""
    import torch

    max_length, length = model.config.n_positions, len(ids)
    logprobs = np.full(length, np.nan, np.float32)
    nll_sum, n_tokens, documented_sum, documented_tokens = 0.0, 0, 0.0, 0
    prev_end = 0
    for begin in range(0, length, stride):
        end = min(begin + max_length, length)
        n_targets = end - prev_end
        input_ids = torch.from_numpy(ids[None, begin:end])
        labels = input_ids.clone()
        labels[:, :-n_targets] = -100
        with torch.no_grad():
            output = model(input_ids, labels=labels)
        scored = np.flatnonzero(labels[0, 1:] != -100) + 1  # the model's own shift: a window's first label counts never
        log_p = output.logits[0].log_softmax(-1).numpy()
        logprobs[begin + scored] = log_p[scored - 1, ids[begin + scored]]
        nll_sum += float(output.loss) * len(scored)
        n_tokens += len(scored)
        documented_sum += float(output.loss) * (n_targets - 1)
        documented_tokens += n_targets - 1
        prev_end = end
        if end == length:
            break
    return logprobs, {
        "n_tokens": n_tokens,
        "nll_per_token": nll_sum / n_tokens,
        "perplexity": math.exp(nll_sum / n_tokens),
        "documented_perplexity": math.exp(documented_sum / documented_tokens) if documented_tokens else None,
    }


def main(out: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    settings = {"attn_implementation": "eager", "dtype": torch.float32}
    fairytale = GPT2LMHeadModel.from_pretrained(WEIGHTS / "fairytale", **settings).eval()
    tokenizer = GPT2TokenizerFast.from_pretrained(WEIGHTS / "fairytale")
    tiny = GPT2LMHeadModel(GPT2Config(**TINY, attn_implementation="eager")).eval()
    params = random_params(TINY, TINY_SEED, TINY_STD)
    state = {f"transformer.{name}": torch.from_numpy(value) for name, value in params.items()}
    tiny.load_state_dict(state | {"lm_head.weight": torch.from_numpy(params["wte.weight"])})

    arrays, figures = {}, {}
    for text, strides in STRIDES.items():
        model = tiny if text in TINY_IDS else fairytale
        ids = TINY_IDS[text] if text in TINY_IDS else np.array(tokenizer(TALES[text])["input_ids"])
        arrays[f"{text}/ids"] = ids
        for stride in strides:
            logprobs, figures[f"{text}/{stride}"] = strided(model, ids, stride or model.config.n_positions // 2)
            arrays[f"{text}/{stride}/logprobs"] = logprobs
    np.savez_compressed(out / "score.npz", **arrays)
    (out / "score.json").write_text(json.dumps(figures, indent=1) + "\n")
