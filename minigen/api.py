"""The front door: `load`, `generate` and `stream` check what was asked and choose the decoder."""

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import NamedTuple

from minigen.engine.beam import beam_search
from minigen.engine.decode import GeneratedToken, PrefixCache, Run, Sequence, decode
from minigen.engine.hooks import NO_HOOKS
from minigen.engine.model import GPT2
from minigen.engine.speculative import RULES, ModelDrafter, PromptLookupDrafter, speculate
from minigen.engine.validation import is_int, require
from minigen.files.checkpoint import load_config, load_weights
from minigen.files.hub import resolve_checkpoint
from minigen.files.prompt_cache import reuse_prompt
from minigen.options import BeamConfig, DecodingConfig, SamplingConfig, SpeculationConfig
from minigen.results import RowOutput
from minigen.text.stream import stop_predicate
from minigen.text.tokenizer import Tokenizer


class Options(NamedTuple):
    """Every option of a run, by the part of the engine it belongs to."""

    sampling: SamplingConfig
    decoding: DecodingConfig
    beam: BeamConfig
    speculation: SpeculationConfig


# What a caller may give: all fields of these but eos_ids, which come from the model.
CONFIGS = (SamplingConfig, DecodingConfig, BeamConfig, SpeculationConfig)
OPTION_NAMES = {field.name for config in CONFIGS for field in fields(config)} - {"eos_ids"}
# What beam search has no use for: it looks for the best text and draws nothing.
NOT_FOR_BEAMS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
ONLY_FOR_BEAMS = ("length_penalty", "early_stopping")


def load(name=None):
    """(model, tokenizer) of a checkpoint: a folder, a name under weights/ or a hub id; None is the bundled default.

    Raises OSError where there is no such checkpoint, ValueError where its files cannot be used.
    """
    folder = resolve_checkpoint(name)
    config = load_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    return GPT2(config, load_weights(folder, config)), tokenizer


# ---------------------------------------------------------------------------------------- checks


def check_options(options, *, drafts=False, cached=False):
    """The `Options` that these keywords make; needs no model, and fills in a random seed.

    drafts, cached: whether there is a draft model, and whether there is a prompt cache. Raises TypeError for an unknown
    name, ValueError for a value out of range and for options that do not go together.
    """
    for name in options:
        if name not in OPTION_NAMES:
            raise TypeError(f"there is no option {name!r}; the options are {', '.join(sorted(OPTION_NAMES))}")
    options = dict(options)
    stop = options.get("stop")
    if stop is None or isinstance(stop, str | list):
        options["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(32)
    checked = Options(
        *(config(**{f.name: options[f.name] for f in fields(config) if f.name in options}) for config in CONFIGS)
    )

    n, num_beams = checked.decoding.num_return_sequences, checked.beam.num_beams
    lookup = checked.speculation.prompt_lookup_num_tokens
    if num_beams > 1:
        require(n <= num_beams, "num_return_sequences", n, f"at most num_beams, {num_beams}")
        for name in NOT_FOR_BEAMS:
            if name in options:
                raise ValueError(f"{name} is {options[name]!r}, but beam search does not use it: leave it out")
        require(not checked.decoding.context_shift, "context_shift", True, "False with beam search")
        if drafts or lookup:
            raise ValueError(f"num_beams is {num_beams}, but speculation goes without beams: leave one of the two out")
    for name in ONLY_FOR_BEAMS if num_beams == 1 else ():
        if name in options:
            raise ValueError(f"{name} is {options[name]!r}, but only beam search uses it: set num_beams to 2 or more")
    if drafts and lookup:
        raise ValueError(
            f"prompt_lookup_num_tokens is {lookup}, but there is a draft model as well: leave one of the two out"
        )
    if "num_draft_tokens" in options and not drafts:
        raise ValueError(
            f"num_draft_tokens is {options['num_draft_tokens']!r}, but there is no draft model: give one as well"
        )
    if checked.decoding.keep and not checked.decoding.context_shift:
        raise ValueError(f"keep is {checked.decoding.keep}, but only context_shift uses it: set that as well")
    if "max_matching_ngram_size" in options and not lookup:
        raise ValueError(
            f"max_matching_ngram_size is {options['max_matching_ngram_size']!r}, but only drafts from the text itself "
            "use it: set prompt_lookup_num_tokens as well"
        )
    if drafts or lookup:
        require(n == 1, "num_return_sequences", n, "1 with speculation, which runs one text at a time")
        require(checked.decoding.use_cache, "use_cache", False, "True with speculation")
    if cached:
        window = checked.decoding.window
        require(window is None, "window", window, "None with a prompt cache, which keeps the whole prompt")
        require(checked.decoding.use_cache, "use_cache", False, "True with a prompt cache")
    return checked


def _bias_by_id(logit_bias, tokenizer, vocab_size):
    """logit_bias with every text replaced by the id of the one token it is."""
    by_id = {}
    for token, value in logit_bias.items():
        if isinstance(token, str):
            ids = tokenizer.encode(token)
            if len(ids) != 1:
                raise ValueError(f"logit_bias names {token!r}, which is {len(ids)} tokens, {ids}; it must be one")
            token = ids[0]
        ok = is_int(token, 0) and token < vocab_size
        require(ok, "a key of logit_bias", token, f"a token id of 0 to {vocab_size - 1}, or the text of a token")
        by_id[token] = value
    return by_id


def _prompt_ids(model, tokenizer, prompts, context_shift):
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
        if len(ids) > config.n_positions and not context_shift:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; the model takes at most {config.n_positions}: shorten it, or "
                "use context_shift"
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
        raise ValueError(
            f"{name} is {value}, but keys, values and logits of {rows} texts of up to {length} tokens take "
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


def stream(model, tokenizer, prompts, *, draft_model=None, cache=None, hooks=NO_HOOKS, **options):
    """Generate, and yield a `Step` for each token as it is made; a row's last step carries its `Completion`.

    prompts: a text, a list of texts, or a list of lists of token ids. draft_model: what `load` returned for a smaller
    model with the same vocabulary; it then drafts (speculative decoding). cache: the path of a file that keeps the keys
    and values of a single prompt: the longest common prefix with the saved prompt is not computed again. Or a
    `PrefixCache`, which does the same in memory, for the generated tokens too. hooks: a `hooks.Hooks`, callbacks of the
    run. options: the fields of `SamplingConfig`, `DecodingConfig`, `BeamConfig` and `SpeculationConfig`; logit_bias may
    be keyed by the text of a token as well as by id. `Step.row` counts prompt by prompt: row r continues
    prompts[r // num_return_sequences].

    Raises TypeError or ValueError at once, before anything is computed, for invalid options and prompts. The first step
    raises OSError if the file `cache` cannot be read or written, ValueError if it is damaged or another model's.
    """
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = _bias_by_id(options["logit_bias"], tokenizer, model.config.vocab_size)
    sampling, decoding, beam, speculation = check_options(
        options, drafts=draft_model is not None, cached=cache is not None
    )
    sampling = replace(sampling, eos_ids=model.config.eos_ids)
    if decoding.context_shift:
        # Half the context must be left to drop, or each shift would make room for hardly a token.
        allowed = f"less than half the model's context, {model.config.n_positions}, with context_shift"
        require(decoding.keep < model.config.n_positions / 2, "keep", decoding.keep, allowed)
    prompt_ids = _prompt_ids(model, tokenizer, prompts, decoding.context_shift)
    if not prompt_ids:
        return iter(())
    drafts = draft_model is not None or speculation.prompt_lookup_num_tokens
    n = decoding.num_return_sequences
    if cache is not None:
        ok = isinstance(cache, str | os.PathLike | PrefixCache)
        require(ok, "cache", cache, "the path of a file, a PrefixCache, or None")
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with a prompt cache")
        if isinstance(cache, PrefixCache):
            require(cache.model is model, "cache", cache, "a PrefixCache of the same model")
            if beam.num_beams == 1:
                require(n == 1, "num_return_sequences", n, "1 with a PrefixCache, which holds one text")
    if drafts:
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with speculation")
    if draft_model is not None:
        ok = isinstance(draft_model, tuple) and len(draft_model) == 2
        require(ok, "draft_model", draft_model, "what load() returned for it, a model and its tokenizer")
        _check_same_vocabulary(tokenizer, draft_model[1])
    length = min(max(map(len, prompt_ids)) + decoding.max_tokens, decoding.window or math.inf, model.config.n_positions)
    if beam.num_beams > 1:
        _check_memory(model.config, "num_beams", beam.num_beams, beam.num_beams, length)
    else:
        _check_memory(model.config, "num_return_sequences", n, n * len(prompt_ids), length)

    rule = RULES[speculation.speculation_rule]

    def decoder(run, rows):
        if decoding.max_tokens == 0:
            return _end_at_once(run, rows)
        if beam.num_beams > 1:
            return beam_search(run, rows, beam)
        if draft_model is not None:
            draft = draft_model[0]
            if isinstance(cache, PrefixCache):
                draft_cache = cache.draft = cache.draft or PrefixCache(draft)
            else:
                draft_cache = run.new_cache([[0] * min(len(rows[0].ids), draft.config.n_positions)], draft)
            drafter = ModelDrafter(draft_cache, model.config.vocab_size, sampling)
            return speculate(run, rows[0], drafter, speculation.num_draft_tokens, rule)
        if drafts:
            drafter = PromptLookupDrafter(speculation.max_matching_ngram_size)
            return speculate(run, rows[0], drafter, speculation.prompt_lookup_num_tokens, rule)
        return decode(run, rows)

    def steps():
        # Beam search and speculation take one prompt at a time; plain decoding takes all of them in one batch.
        every = range(len(prompt_ids))
        for batch in [[prompt] for prompt in every] if drafts or beam.num_beams > 1 else [every]:
            prefix = cache if isinstance(cache, PrefixCache) else None
            run = Run(model, sampling, decoding, hooks, prefix, stop_predicate(tokenizer, decoding.stop))
            rows = [Sequence(run, prompt_ids[prompt], prompt, number) for prompt in batch for number in range(n)]
            outputs = {row.index: RowOutput(run, tokenizer) for row in rows}
            tokens = decoder(run, rows)
            if cache is not None and prefix is None and decoding.max_tokens:
                tokens = reuse_prompt(cache, run, list(rows[0].context), tokens)
            for generated in tokens:
                yield outputs[generated.row.index].step(generated)

    return exclusive(cache, steps(), "the PrefixCache") if isinstance(cache, PrefixCache) else steps()


def _end_at_once(run, rows):
    """max_tokens=0: every row ends without a token."""
    run.hooks.on_start(run, rows)
    for row in rows:
        row.finish_reason = "length"
        yield GeneratedToken(row, None, None)


def exclusive(owner, steps, what):
    """The same steps. The first raises ValueError if another run of `owner` has neither ended nor been closed."""
    if owner.busy:
        raise ValueError(f"{what} is in use by a run that has not ended: finish that, or close its iterator")
    owner.busy = True
    try:
        yield from steps
    finally:
        owner.busy = False


def completions(steps):
    """The `Completion`s that a run's steps end with, in the order of its rows."""
    finished = [step for step in steps if step.completion]
    return [step.completion for step in sorted(finished, key=lambda step: step.row)]


def generate(model, tokenizer, prompts, *, draft_model=None, cache=None, **options):
    """Generate, and return the finished `Completion`s: num_return_sequences per prompt, in the order of the prompts.

    Arguments and errors are those of `stream`.
    """
    return completions(stream(model, tokenizer, prompts, draft_model=draft_model, cache=cache, **options))
