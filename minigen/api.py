"""The public functions `load`, `generate` and `stream`: they check the arguments and choose the decoder."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from minigen.engine.beam import beam_search
from minigen.engine.decode import GeneratedToken, PrefixCache, Run, Sequence, decode
from minigen.engine.hooks import NO_HOOKS, Hooks
from minigen.engine.model import GPT2
from minigen.engine.speculative import RULES, ModelDrafter, PromptLookupDrafter, speculate
from minigen.engine.validation import is_int, short_repr
from minigen.files.checkpoint import load_config, load_weights
from minigen.files.hub import resolve_checkpoint
from minigen.files.prompt_cache import reuse_prompt
from minigen.options import PARTS, OptionError, check_loaded, check_options, is_loaded, require, takes_options
from minigen.results import RowOutput, RunTimer
from minigen.text.stream import stop_predicate
from minigen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigen.options import GenerateOptions


def load(name=None):
    """(model, tokenizer) of a checkpoint: a folder, a name under weights/ or a hub id; None is the bundled default.

    Raises OSError if there is no such checkpoint, ValueError if its files cannot be used.
    """
    folder = resolve_checkpoint(name)
    config = load_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    return GPT2(config, load_weights(folder, config)), tokenizer


# ---------------------------------------------------------------------------------------- checks


def _prompt_ids(model, tokenizer, prompts, context_shift):
    """The ids of each prompt, checked against the model. An empty prompt becomes the begin-of-text id."""
    config = model.config
    allowed = "a text, a list of texts, or a list of lists of token ids"
    require(isinstance(prompts, str | list | tuple), "prompts", prompts, allowed)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    rows = []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list | tuple):
            raise ValueError(f"prompt {index} is {short_repr(prompt)}; it must be a text or a list of token ids")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            if config.bos_token_id is None:
                raise ValueError(f"prompt {index} is empty, and the model has no begin-of-text token to start from")
            ids = [config.bos_token_id]
        for token in ids:
            if not is_int(token, 0) or token >= config.vocab_size:
                raise ValueError(
                    f"prompt {index} holds {short_repr(token)}; token ids are 0 to {config.vocab_size - 1}"
                )
        if len(ids) > config.n_positions and not context_shift:
            raise OptionError(
                f"prompt {index} has {len(ids)} tokens; the model takes at most {config.n_positions}: shorten it, or "
                "use {context_shift}"
            )
        rows.append([int(token) for token in ids])
    return rows


def _check_memory(config, name, value, rows, length):
    """Raise ValueError if the caches and logits for the full requested length would not fit in physical memory.

    Memory is taken only when it is written to: without this check it would run out a long time later.
    """
    if not hasattr(os, "sysconf"):
        return
    physical_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 4 * rows * (2 * config.n_layer * config.n_embd * length + config.vocab_size)
    if needed > physical_memory:
        raise OptionError(
            f"{{{name}}} is {value}, but keys, values and logits of {rows} texts of up to {length} tokens take "
            f"{needed / 2**30:.1f} GiB of the machine's {physical_memory / 2**30:.1f}: ask for fewer or shorter texts"
        )


def _check_same_vocabulary(tokenizer, draft_tokenizer):
    """Raise ValueError if an id that both vocabularies have means different tokens."""
    id = tokenizer.first_difference(draft_tokenizer)
    if id is not None:
        expected, actual = tokenizer.token_bytes(id), draft_tokenizer.token_bytes(id)
        raise ValueError(
            f"the draft model has another vocabulary: token {id} is {actual!r} there and {expected!r} in the model"
        )


# ---------------------------------------------------------------------------------------- generation


@takes_options
def stream(
    model, tokenizer, prompts, *, draft_model=None, cache=None, hooks=NO_HOOKS, **options: Unpack[GenerateOptions]
):
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
    check_loaded(model=model, tokenizer=tokenizer)
    sampling, decoding, beam, speculation = check_options(
        options, drafts=draft_model is not None, cached=cache is not None, model=model, tokenizer=tokenizer
    )
    prompt_ids = _prompt_ids(model, tokenizer, prompts, decoding.context_shift)
    if not prompt_ids:
        return iter(())
    require(isinstance(hooks, Hooks), "hooks", hooks, "an instance of minigen.engine.hooks.Hooks")
    drafts = draft_model is not None or speculation.prompt_lookup_num_tokens
    n = decoding.num_return_sequences
    if cache is not None:
        ok = isinstance(cache, str | os.PathLike | PrefixCache) and "\0" not in str(cache)
        require(ok, "cache", cache, "the path of a file, a PrefixCache, or None")
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with a prompt cache")
        if isinstance(cache, PrefixCache):
            require(cache.model is model, "cache", cache, "a PrefixCache of the same model")
            if beam.num_beams == 1:
                require(n == 1, "num_return_sequences", n, "1 with a PrefixCache, which holds one text")
    if drafts:
        require(len(prompt_ids) == 1, "the number of prompts", len(prompt_ids), "1 with speculation")
    if draft_model is not None:
        ok = isinstance(draft_model, tuple) and len(draft_model) == 2 and all(map(is_loaded, PARTS, draft_model))
        require(ok, "draft_model", draft_model, "what load() returned for it, a model and its tokenizer")
        _check_same_vocabulary(tokenizer, draft_model[1])
    length = min(max(map(len, prompt_ids)) + decoding.max_tokens, decoding.window or math.inf, model.config.n_positions)
    if isinstance(cache, PrefixCache):
        ok = cache.kv.window is None and cache.kv.capacity >= length
        require(ok, "cache", cache, f"a PrefixCache without a window, of at least {length} slots for this run")
    if beam.num_beams > 1:
        _check_memory(model.config, "num_beams", beam.num_beams, beam.num_beams, length)
    else:
        n_prompts = len(prompt_ids)
        name, value = ("num_return_sequences", n) if n > 1 else ("the number of prompts", n_prompts)
        _check_memory(model.config, name, value, n * n_prompts, length)

    rule = RULES[speculation.speculation_rule]

    def decoder(run, rows):
        if decoding.max_tokens == 0:
            return _end_at_once(run, rows)
        if beam.num_beams > 1:
            return beam_search(run, rows, beam)
        if draft_model is not None:
            draft = draft_model[0]
            if speculation.draft_vocab_size is not None:
                draft = draft.with_first_logits(speculation.draft_vocab_size)
            if isinstance(cache, PrefixCache):
                if cache.draft is None or cache.draft.model.params is not draft.params:
                    cache.draft = PrefixCache(draft)
                draft_cache = cache.draft
                draft_cache.model = draft
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
            stops = stop_predicate(tokenizer, decoding.stop)
            timer = RunTimer()
            run = Run(model, sampling, decoding, hooks, prefix, stops, timer.record)
            rows = [Sequence(run, prompt_ids[prompt], prompt, number) for prompt in batch for number in range(n)]
            outputs = {row.index: RowOutput(run, tokenizer, timer) for row in rows}
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
        row.update_finish_reason()
        yield GeneratedToken(row, None, None)


def exclusive(owner, steps, what):
    """Yield `steps` unchanged. The first raises ValueError if another run of `owner` has not ended or been closed."""
    if owner.busy:
        raise ValueError(f"{what} is used by a run that has not ended: finish it, or close its iterator")
    owner.busy = True
    try:
        yield from steps
    finally:
        owner.busy = False


def completions(steps):
    """The `Completion`s that a run's steps end with, in the order of its rows."""
    finished = [step for step in steps if step.completion]
    return [step.completion for step in sorted(finished, key=lambda step: step.row)]


@takes_options
def generate(model, tokenizer, prompts, *, draft_model=None, cache=None, **options: Unpack[GenerateOptions]):
    """Generate, and return the finished `Completion`s: num_return_sequences per prompt, in the order of the prompts.

    prompts: a text, a list of texts, or a list of lists of token ids. draft_model: what `load` returned for a smaller
    model with the same vocabulary; it then drafts. cache: the path of a file that keeps the prompt's keys and values,
    or a `PrefixCache`. Errors are those of `stream`.
    """
    return completions(stream(model, tokenizer, prompts, draft_model=draft_model, cache=cache, **options))
