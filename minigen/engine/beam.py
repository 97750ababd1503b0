"""Beam search: keep the num_beams most probable partial texts, extend each by every token, keep the best again.

A finished text scores

    sum of its log-probabilities / generated_length ** length_penalty

The length counts the generated tokens, EOS included, but not the prompt's. Candidates, stopping rules and scores are
those of the transformers library, hypothesis for hypothesis.

The prompt is run once, for one row; then the beams share one batch, and a step costs one forward pass. A beam that goes
on stays in its row: only the rows of dropped beams are overwritten, after the prefix that they share with the new beam.
"""

from typing import NamedTuple

import numpy as np

from minigen.engine.decode import GeneratedToken
from minigen.engine.sampler import History, apply_logits_processors, check_logits, log_softmax, top_ids


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


def beam_search(run, rows, beam):
    """Search for the most probable continuations of one prompt; yields a `GeneratedToken` for each of their tokens.

    rows: num_return_sequences `Sequence`s of the same prompt, at most num_beams; they get the best texts, best first.
    If fewer different texts exist, the last rows end without a token. beam: options.BeamConfig.
    """
    run.hooks.on_start(run, rows)
    prompt = list(rows[0].ids)  # a copy: the rows grow
    hypotheses = _search(run, prompt, beam)
    for row, hypothesis in zip(rows, hypotheses, strict=False):
        row.score, row.sum_logprob = hypothesis.score, hypothesis.sum_logprob
        logits = [None] * len(hypothesis.tokens)
        if run.decoding.logprobs is not None:  # the search keeps none: run this text once more, reusing the prompt
            logits = run.feed([prompt + hypothesis.tokens[:-1]], len(hypothesis.tokens))[0]  # [1, T, V] -> [T, V]
        for token, row_logits in zip(hypothesis.tokens, logits, strict=True):
            row.append(token)
            yield GeneratedToken(row, token, row_logits)
    for row in rows[len(hypotheses) :]:
        row.update_finish_reason()
        yield GeneratedToken(row, None, None)


def _search(run, prompt, beam):
    """The finished hypotheses of one prompt, best first, at most num_beams."""
    num_beams, n_prompt = beam.num_beams, len(prompt)
    max_length = min(run.decoding.max_tokens, run.model.config.n_positions - n_prompt + 1)
    # At most one candidate per beam and EOS id ends with EOS, so at least num_beams of this many do not. (At least 2
    # per beam, as in transformers.)
    count = max(2, 1 + len(run.sampling.eos_ids)) * num_beams
    beams, sums, finished = [[]], [0.0], []
    logits = run.feed([prompt])[:, 0]  # [1, 1, V] -> [1, V]
    while True:
        candidates = _best_candidates(logits, list(zip(beams, sums, strict=True)), prompt, run.sampling, count)
        length = len(beams[0]) + 1
        running = []
        for rank, candidate in enumerate(candidates):
            tokens = [*beams[candidate.parent], candidate.token]
            if run.finish_reason(prompt + tokens, n_prompt) is None:
                running.append(candidate)
            elif rank < num_beams:  # a finished text further down the list is dropped
                score = candidate.sum_logprob / length**beam.length_penalty
                finished.append(Hypothesis(score, candidate.sum_logprob, tokens))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:num_beams]
        kept = _assign_rows(running[:num_beams])
        run.hooks.on_beam_step(beams, logits, candidates, kept, finished)
        if not running and not finished:
            check_logits(np.empty(0), length - 1)  # raises the error
        if not running or _is_done(running[0], finished, length, max_length, beam):
            break
        beams = [[*beams[candidate.parent], candidate.token] for candidate in kept]
        sums = [candidate.sum_logprob for candidate in kept]
        run.cache.reorder([candidate.parent for candidate in kept])
        logits = run.feed([prompt + tokens for tokens in beams])[:, 0]  # [B, 1, V] -> [B, V]
    return finished


def _is_done(best_running, finished, length, max_length, beam):
    """Whether the search ends: with num_beams finished texts, by the rule that `early_stopping` names."""
    if len(finished) < beam.num_beams:
        return False
    at_length = max_length if beam.early_stopping == "never" and beam.length_penalty > 0 else length
    best_possible = best_running.sum_logprob / at_length**beam.length_penalty
    return beam.early_stopping is True or best_possible <= finished[-1].score


def _best_candidates(logits, beams, prompt, sampling, count):
    """The `count` most probable extensions of all beams, best first.

    logits: [B, V], beams: B pairs of generated ids and the sum of their log-probabilities.
    """
    candidates = []
    for parent, (row_logits, (beam, total)) in enumerate(zip(logits, beams, strict=True)):
        history = History(prompt + beam, len(prompt))
        logprobs = apply_logits_processors(log_softmax(row_logits), history, sampling)  # [V]
        if logprobs.max() != -np.inf:  # a beam that cannot go on is not an error while others can
            check_logits(logprobs, len(beam))
        # No beam can have more than `count` among the best of all.
        candidates += [
            Candidate(total + float(logprobs[token]), parent, int(token)) for token in top_ids(logprobs, count)
        ]
    possible = [candidate for candidate in candidates if candidate.sum_logprob > -np.inf]
    return sorted(possible, key=lambda candidate: (-candidate.sum_logprob, candidate.parent, candidate.token))[:count]


def _assign_rows(running):
    """The running candidates in an order in which a beam that goes on stays in its row, if that row remains."""
    rows = [None] * len(running)
    displaced = []
    for candidate in running:
        if candidate.parent < len(rows) and rows[candidate.parent] is None:
            rows[candidate.parent] = candidate
        else:
            displaced.append(candidate)
    return [candidate or displaced.pop(0) for candidate in rows]
