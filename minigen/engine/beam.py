"""Beam search: keep the num_beams most probable partial texts, extend each by every token, keep the best again.

A finished text scores

    sum of its log-probabilities / generated_length ** length_penalty

where the length counts the generated tokens, end-of-text included, and not the prompt's. Candidates, stopping rules and
scores are those of the transformers library, hypothesis for hypothesis.

The prompt is run once, for one row; then the beams share the rows of one batch, and a step costs one forward pass. A
beam that goes on stays in its row: once there are num_beams rows, only those of beams that died are overwritten, and,
if no window has wrapped the ring, only the slots after the prompt.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minigen.engine.decode import NO_HOOKS, Step, feed, new_cache, prefill
from minigen.engine.sampler import History, check_logits, log_softmax, process
from minigen.text.stream import IncrementalUtf8Decoder


class Candidate(NamedTuple):
    """One beam extended by one token."""

    sum_logprob: float
    parent: int  # the beam's row
    token: int


class Hypothesis(NamedTuple):
    """A finished text."""

    score: float
    sum_logprob: float
    tokens: list[int]


def _best_candidates(logits, beams, sums, prompt, sampling, count):
    """The `count` most probable extensions of all beams, best first.

    logits: [B, V], beams: B lists of generated ids, sums: B sums of log-probabilities.
    """
    found = []
    for parent, (row_logits, beam, total) in enumerate(zip(logits, beams, sums, strict=True)):
        logprobs = process(log_softmax(row_logits), History(prompt + beam, len(prompt)), sampling)  # [V]
        if logprobs.max() != -np.inf:  # a beam that cannot go on is no error while others can
            check_logits(logprobs, len(beam))
        # Of one beam no more than `count` can be among the best of all.
        best = np.argpartition(logprobs, -count)[-count:] if count < len(logprobs) else np.arange(len(logprobs))
        found += [Candidate(total + float(logprobs[token]), parent, int(token)) for token in best]
    possible = [candidate for candidate in found if candidate.sum_logprob > -np.inf]
    return sorted(possible, key=lambda candidate: (-candidate.sum_logprob, candidate.parent, candidate.token))[:count]


def _assign_rows(running):
    """The running candidates in an order in which a beam that goes on stays in its row wherever that row remains."""
    rows = [None] * len(running)
    displaced = []
    for candidate in running:
        if candidate.parent < len(rows) and rows[candidate.parent] is None:
            rows[candidate.parent] = candidate
        else:
            displaced.append(candidate)
    return [candidate or displaced.pop(0) for candidate in rows]


def _search(model, prompt, tokenizer, sampling, config, beam, stopwatch, prompt_cache, hooks):
    """The finished hypotheses of one prompt, best first, at most num_beams."""
    budget = min(config.max_tokens, model.config.n_positions - len(prompt) + 1)
    # Each beam has at most one candidate for each end-of-text id: of so many, num_beams go on after all that end so.
    count = max(2, 1 + len(sampling.eos_ids)) * beam.num_beams

    def ends(tokens):
        if tokens[-1] in sampling.eos_ids or len(tokens) == budget:
            return True
        text = IncrementalUtf8Decoder().push(b"".join(map(tokenizer.token_bytes, tokens))) if config.stop else ""
        return any(stop in text for stop in config.stop)

    beams, sums, finished = [[]], [0.0], []
    cache = new_cache(model, [prompt], config)
    logits = prefill(model, cache, [prompt], stopwatch, prompt_cache, hooks)
    while True:
        stopwatch.lap(cache)
        candidates = _best_candidates(logits, beams, sums, prompt, sampling, count)
        length = len(beams[0]) + 1
        running = []
        for rank, candidate in enumerate(candidates):
            tokens = [*beams[candidate.parent], candidate.token]
            if not ends(tokens):
                running.append(candidate)
            elif rank < beam.num_beams:  # one that ends further down the list is dropped
                score = candidate.sum_logprob / length**beam.length_penalty
                finished.append(Hypothesis(score, candidate.sum_logprob, tokens))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[: beam.num_beams]
        kept = _assign_rows(running[: beam.num_beams])
        hooks.searched(beams, logits, candidates, kept, finished)
        if not running:
            if not finished:
                check_logits(np.array([-np.inf]), length - 1)
            return finished
        if len(finished) == beam.num_beams:
            at_length = budget if beam.early_stopping == "never" and beam.length_penalty > 0 else length
            best_possible = running[0].sum_logprob / at_length**beam.length_penalty
            if beam.early_stopping is True or best_possible <= finished[-1].score:
                return finished

        beams = [[*beams[candidate.parent], candidate.token] for candidate in kept]
        sums = [candidate.sum_logprob for candidate in kept]
        if config.use_cache:
            cache.reorder([candidate.parent for candidate in kept], shared=len(prompt))
        else:
            cache = new_cache(model, [prompt] * len(beams), config)
        logits = feed(model, cache, [prompt + tokens for tokens in beams], hooks)


def beam_search(
    model, rows, tokenizer, sampling, config, beam, stopwatch, prompt_cache=None, hooks=NO_HOOKS
) -> Iterator[Step]:
    """Search for the continuations of one prompt; its rows get the best ones, best first.

    rows: `num_return_sequences` rows of the same prompt, at most num_beams. Where fewer different texts exist, the
    last rows end without a token. prompt_cache: see `decode.prefill`.
    """
    hooks.began(rows, sampling, config)
    if config.max_tokens == 0:
        yield from (row.end("length") for row in rows)
        return
    prompt = list(rows[0].context)  # a copy: the rows grow
    found = _search(model, prompt, tokenizer, sampling, config, beam, stopwatch, prompt_cache, hooks)
    for row, hypothesis in zip(rows, found, strict=False):
        row.score, row.sum_logprob = hypothesis.score, hypothesis.sum_logprob
        logits = [None] * len(hypothesis.tokens)
        if config.logprobs is not None:
            text = np.array([prompt + hypothesis.tokens[:-1]])
            cache = model.new_cache(1, text.size, config.window and min(config.window, text.size))
            logits = model.forward(text, cache, last_only=False)[0, len(prompt) - 1 :]  # [1, T, V] -> [generated, V]
        for token, row_logits in zip(hypothesis.tokens, logits, strict=True):
            yield row.accept(token, row_logits)
    for row in rows[len(found) :]:
        yield row.end("length")
