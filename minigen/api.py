"""The front door: `load`, `generate` and `stream` check what was asked and choose the decoder."""

import secrets
from collections.abc import Mapping
from dataclasses import fields, replace

from minigen.checkpoint import find, load_config, read_tensors
from minigen.checks import is_int, require
from minigen.decode import DecodingConfig, Row, Stopwatch, decode
from minigen.model import GPT2
from minigen.sampler import SamplingConfig
from minigen.tokenizer import Tokenizer

# Options that a caller may give, by the part of the engine that they belong to; eos_ids come from the model.
SAMPLING_OPTIONS = {field.name for field in fields(SamplingConfig)} - {"eos_ids"}
DECODING_OPTIONS = {field.name for field in fields(DecodingConfig)}


def load(name=None):
    """(model, tokenizer) of a checkpoint: a folder, a name under weights/ or a hub id; None is the bundled default.

    Raises OSError where there is no such checkpoint, ValueError where its files cannot be used.
    """
    folder = find(name)
    config = load_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    return GPT2(config, read_tensors(folder, config)), tokenizer


def check_options(options):
    """(`SamplingConfig`, `DecodingConfig`) from keyword options; needs no model, and fills in a random seed.

    Raises TypeError for an unknown name, ValueError for a value out of range.
    """
    for name in options:
        if name not in SAMPLING_OPTIONS | DECODING_OPTIONS:
            known = ", ".join(sorted(SAMPLING_OPTIONS | DECODING_OPTIONS))
            raise TypeError(f"there is no option {name!r}; the options are {known}")
    sampling = SamplingConfig(**{name: value for name, value in options.items() if name in SAMPLING_OPTIONS})
    decoding = {name: value for name, value in options.items() if name in DECODING_OPTIONS}
    stop = decoding.get("stop") or ()
    decoding["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if decoding.get("seed") is None:
        decoding["seed"] = secrets.randbits(32)
    return sampling, DecodingConfig(**decoding)


def _bias_by_id(logit_bias, tokenizer):
    """logit_bias with every text replaced by the id of the one token it is."""
    by_id = {}
    for token, value in logit_bias.items():
        if isinstance(token, str):
            ids = tokenizer.encode(token)
            if len(ids) != 1:
                raise ValueError(f"logit_bias names {token!r}, which is {len(ids)} tokens, {ids}; it must be one")
            token = ids[0]
        by_id[token] = value
    return by_id


def _prompt_ids(model, tokenizer, prompts):
    """The ids of each prompt, checked against the model. An empty prompt becomes the begin-of-text id."""
    config = model.config
    prompts = [prompts] if isinstance(prompts, str) else prompts
    rows = []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list | tuple):
            raise ValueError(f"prompt {index} is {prompt!r}; it must be a text or a list of token ids")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            if config.bos_token_id is None:
                raise ValueError(f"prompt {index} is empty, and the model has no begin-of-text token to start from")
            ids = [config.bos_token_id]
        for token in ids:
            if not is_int(token, 0) or token >= config.vocab_size:
                raise ValueError(f"prompt {index} holds {token!r}; token ids are 0 to {config.vocab_size - 1}")
        if len(ids) > config.n_positions:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; the model takes at most {config.n_positions}: shorten it"
            )
        rows.append([int(token) for token in ids])
    return rows


def stream(model, tokenizer, prompts, **options):
    """Generate, and yield a `Step` for each token as it is made; a row's last step carries its `Completion`.

    prompts: a text, a list of texts, or a list of lists of token ids. options: those of `SamplingConfig` and
    `DecodingConfig`; logit_bias may be keyed by the text of a token as well as by id. `Step.row` counts prompt by
    prompt: row r continues prompts[r // num_return_sequences].

    Raises TypeError or ValueError at once, before anything is computed, for options and prompts that cannot be used.
    """
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = _bias_by_id(options["logit_bias"], tokenizer)
    sampling, decoding = check_options(options)
    sampling = replace(sampling, eos_ids=model.config.eos_ids)
    for token in sampling.logit_bias:
        allowed = f"a token id of 0 to {model.config.vocab_size - 1}"
        require(token < model.config.vocab_size, "a key of logit_bias", token, allowed)
    if decoding.context_shift:
        # Half the context must be left to drop, or each shift would make room for hardly a token.
        allowed = f"less than half the model's context, {model.config.n_positions}, with context_shift"
        require(decoding.keep < model.config.n_positions / 2, "keep", decoding.keep, allowed)
    prompt_ids = _prompt_ids(model, tokenizer, prompts)

    stopwatch = Stopwatch()
    n = decoding.num_return_sequences
    rows = [
        Row(index, index // n, prompt_ids[index // n], model, tokenizer, sampling, decoding, stopwatch)
        for index in range(len(prompt_ids) * n)
    ]
    return decode(model, rows, sampling, decoding, stopwatch)


def generate(model, tokenizer, prompts, **options):
    """Generate, and return the finished `Completion`s: num_return_sequences for each prompt, in the prompts' order.

    Arguments and errors are those of `stream`.
    """
    finished = [step for step in stream(model, tokenizer, prompts, **options) if step.completion]
    return [step.completion for step in sorted(finished, key=lambda step: step.row)]
