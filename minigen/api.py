"""The front door: `load`, `generate` and `stream` check what was asked and choose the decoder."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from minigen.engine.beam import beam_search
from minigen.engine.decode import NO_HOOKS, PrefixCache, Row, Stopwatch, decode, exclusive
from minigen.engine.model import GPT2
from minigen.engine.speculative import ModelDrafter, PromptLookupDrafter, speculate
from minigen.engine.validation import is_int
from minigen.files.checkpoint import load_config, load_weights
from minigen.files.hub import resolve_checkpoint
from minigen.options import OptionError, check_options, require, takes_options
from minigen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigen.options import GenerateOptions


def load(name=None):
    """(model, tokenizer) of a checkpoint: a folder, a name under weights/ or a hub id; None is the bundled default.

    Raises OSError where there is no such checkpoint, ValueError where its files cannot be used.
    """
    folder = resolve_checkpoint(name)
    config = load_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    return GPT2(config, load_weights(folder, config)), tokenizer


# ---------------------------------------------------------------------------------------- checks


def _prompt_ids(model, tokenizer, prompts):
    """The ids of each prompt, checked against the model. An empty prompt becomes the begin-of-text id."""
    config = model.config
    allowed = "a text, a list of texts, or a list of lists of token ids"
    require(isinstance(prompts, str | list | tuple), "prompts", prompts, allowed)
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


def _check_memory(config, name, value, rows, length):
    """Raise ValueError where what every row needs for its whole length, keys, values and logits, is more than there is.

    Memory is taken only when it is written to: without this, it would run out a long time later.
    """
    if not hasattr(os, "sysconf"):
        return
    there_is = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 4 * rows * (2 * config.n_layer * config.n_embd * length + config.vocab_size)
    if needed > there_is:
        raise OptionError(
            f"{{{name}}} is {value}, but keys, values and logits of {rows} texts of up to {length} tokens take "
            f"{needed / 2**30:.1f} GiB of the machine's {there_is / 2**30:.1f}: ask for fewer or shorter texts"
        )


def _check_same_vocabulary(tokenizer, draft_tokenizer):
    """Raise ValueError where an id that both vocabularies have means different tokens."""
    for token in range(min(tokenizer.n_vocab, draft_tokenizer.n_vocab)):
        ours, theirs = tokenizer.token_bytes(token), draft_tokenizer.token_bytes(token)
        if ours != theirs and ours and theirs:
            raise ValueError(
                f"the draft model's vocabulary is another: token {token} is {theirs!r} there and {ours!r} in the model"
            )


# ---------------------------------------------------------------------------------------- generation


@takes_options
def stream(
    model, tokenizer, prompts, *, draft_model=None, cache=None, hooks=NO_HOOKS, **options: Unpack[GenerateOptions]
):
    """Generate, and yield a `Step` for each token as it is made; a row's last step carries its `Completion`.

    prompts: a text, a list of texts, or a list of lists of token ids. draft_model: what `load` returned for a smaller
    model with the same vocabulary; it then drafts. cache: the path of a file for the keys and values of the prompt, one
    only: what the prompt has in common with the last one, at its beginning, is not computed again. Or a `PrefixCache`,
    which does the same in memory, and for the generated tokens too. hooks: a `hooks.Hooks`, which is told what
    the run does. options: the fields of `SamplingConfig`, `DecodingConfig`, `BeamConfig` and `SpeculationConfig`;
    logit_bias may be keyed by the text of a token as well as by id. `Step.row` counts prompt by prompt: row r continues
    prompts[r // num_return_sequences].

    Raises TypeError or ValueError at once, before anything is computed, for options and prompts that cannot be used.
    The first step raises OSError where the file `cache` cannot be read or written, ValueError where it is damaged or
    another model's.
    """
    sampling, decoding, beam, speculation = check_options(
        options, drafts=draft_model is not None, cached=cache is not None, model=model, tokenizer=tokenizer
    )
    prompt_ids = _prompt_ids(model, tokenizer, prompts)
    if not prompt_ids:
        return iter(())
    if cache is not None:
        ok = isinstance(cache, str | os.PathLike | PrefixCache)
        require(ok, "cache", cache, "the path of a file, a PrefixCache, or None")
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with a prompt cache")
    n = decoding.num_return_sequences
    length = min(max(map(len, prompt_ids)) + decoding.max_tokens, decoding.window or math.inf, model.config.n_positions)
    if beam.num_beams > 1:
        _check_memory(model.config, "num_beams", beam.num_beams, beam.num_beams, length)
    else:
        _check_memory(model.config, "num_return_sequences", n, n * len(prompt_ids), length)
    if isinstance(cache, PrefixCache):
        require(cache.model is model, "cache", cache, "a PrefixCache of the same model")
        require(n == 1, "num_return_sequences", n, "1 with a PrefixCache, which holds one text")
        plain = beam.num_beams == 1 and draft_model is None and not speculation.prompt_lookup_num_tokens
        require(plain, "cache", cache, "a file or None with beam search or speculation")

    def rows_of(prompt_indices, stopwatch):
        indices = [index for prompt in prompt_indices for index in range(prompt * n, prompt * n + n)]
        return [Row(i, i // n, prompt_ids[i // n], model, tokenizer, sampling, decoding, stopwatch) for i in indices]

    def one_by_one(run):
        """Searches and speculation take one prompt at a time."""
        for index in range(len(prompt_ids)):
            stopwatch = Stopwatch()
            yield from run(rows_of([index], stopwatch), stopwatch)

    if beam.num_beams > 1:
        return one_by_one(
            lambda rows, stopwatch: beam_search(
                model, rows, tokenizer, sampling, decoding, beam, stopwatch, cache, hooks
            )
        )
    if draft_model is not None or speculation.prompt_lookup_num_tokens:
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with speculation")
        stopwatch = Stopwatch()
        (row,) = rows_of([0], stopwatch)
        if draft_model is None:
            drafter = PromptLookupDrafter(model.config.vocab_size, speculation.max_matching_ngram_size)
            k = speculation.prompt_lookup_num_tokens
        else:
            ok = isinstance(draft_model, tuple) and len(draft_model) == 2
            require(ok, "draft_model", draft_model, "what load() returned for it, a model and its tokenizer")
            draft, draft_tokenizer = draft_model
            _check_same_vocabulary(tokenizer, draft_tokenizer)
            drafter = ModelDrafter(draft, model.config.vocab_size, row.context, sampling, decoding)
            k = speculation.num_draft_tokens
        return speculate(model, row, drafter, sampling, decoding, k, stopwatch, cache, hooks)
    stopwatch = Stopwatch()
    steps = decode(model, rows_of(range(len(prompt_ids)), stopwatch), sampling, decoding, stopwatch, cache, hooks)
    return exclusive(cache.lock, steps, "the PrefixCache") if isinstance(cache, PrefixCache) else steps


def completions(steps):
    """The `Completion`s that a run's steps end with, in the order of its rows."""
    finished = [step for step in steps if step.completion]
    return [step.completion for step in sorted(finished, key=lambda step: step.row)]


@takes_options
def generate(model, tokenizer, prompts, *, draft_model=None, cache=None, **options: Unpack[GenerateOptions]):
    """Generate, and return the finished `Completion`s: num_return_sequences for each prompt, in the prompts' order.

    Arguments and errors are those of `stream`.
    """
    return completions(stream(model, tokenizer, prompts, draft_model=draft_model, cache=cache, **options))
