"""What a run returns: a `Step` per token, a `Completion` per row, log-probabilities and timings."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from minigen.engine.sampler import log_softmax, top_ids
from minigen.engine.speculative import SpeculationStats
from minigen.text.stream import TextStream


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the model itself, before any penalty or filter."""

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]]  # (token, text, logprob) of the most probable, best first (ties: lowest id)


class Timings(NamedTuple):
    """Timing and memory of a run. Times are for the whole batch."""

    prompt_tokens: int
    reused_tokens: int  # prompt tokens whose keys and values were in a cache already
    prompt_seconds: float  # until the first logits, prompt cache files included (time to first token)
    tokens: int
    seconds: float  # from then to the row's last token
    cache_bytes: int


class RunTimer:
    """Measures the time to the first logits (the prompt) and the time after it (generation) separately."""

    def __init__(self):
        self.start = time.perf_counter()
        self.first_logits = None
        self.cache_bytes = 0
        self.reused_tokens = 0

    def record(self, cache):
        """Call this after each pass. The first call marks the end of the prompt."""
        if self.first_logits is None:
            self.first_logits = time.perf_counter()
            self.reused_tokens = cache.n_reused
        self.cache_bytes = max(self.cache_bytes, cache.kv.nbytes)

    def seconds(self):
        """(prompt seconds, generation seconds) until now."""
        now = time.perf_counter()
        first_logits = self.first_logits or now
        return first_logits - self.start, now - first_logits


@dataclass(frozen=True)
class Completion:
    """One finished continuation.

    `token_ids` holds every generated id, including EOS and those of a stop string; `text` does not include these.
    """

    text: str
    token_ids: list[int]
    prompt_index: int
    finish_reason: str  # eos | stop | length | context
    stop_sequence: str | None
    logprobs: list[TokenLogprob] | None
    sum_logprob: float | None  # beam search's sum of log-probabilities; None for other decoders
    score: float | None  # what beam search ranks by: sum_logprob / generated_length ** length_penalty
    speculation: SpeculationStats | None  # None without drafts
    timings: Timings


@dataclass(frozen=True)
class Step:
    """One token of one row as it is generated. The texts of a row's steps, joined, are its completion's text."""

    text: str  # what may be shown now: whole characters, and nothing that may become a stop string
    token: int | None  # None if a row ends without another token
    logprob: TokenLogprob | None
    row: int
    from_draft: bool
    finish_reason: str | None
    completion: Completion | None  # set on the last step of a row


class RowOutput:
    """Turns one row's generated tokens into `Step`s, and the last one into a `Completion`."""

    def __init__(self, run, tokenizer, timer):
        self._run, self._timer = run, timer
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, run.decoding.stop)
        self._texts = []
        self._logprobs = None if run.decoding.logprobs is None else []

    def step(self, generated):
        """The `Step` of one `GeneratedToken` of the row."""
        row, token, text, logprob = generated.row, generated.token, "", None
        finish_reason = row.finish_reason
        if token is not None and finish_reason != "eos":
            text = self._stream.push(token)
        if token is not None and self._logprobs is not None:
            logprob = self._logprob(token, generated.logits)
            self._logprobs.append(logprob)
        if finish_reason:
            text += self._stream.flush()
            if self._stream.stop_sequence:  # an unfinished character, shown as U+FFFD, may complete a stop string
                finish_reason = "stop"
        self._texts.append(text)
        completion = self._completion(row, finish_reason) if finish_reason else None
        return Step(text, token, logprob, row.index, generated.from_draft, finish_reason, completion)

    def _logprob(self, token, logits):
        log_p = log_softmax(logits)
        spell = self._tokenizer.decode
        ids = top_ids(log_p, self._run.decoding.logprobs)
        top = [(int(other), spell([other]), float(log_p[other])) for other in ids]
        return TokenLogprob(token, spell([token]), float(log_p[token]), top)

    def _completion(self, row, finish_reason):
        timer = self._timer
        prompt_seconds, seconds = timer.seconds()
        return Completion(
            text="".join(self._texts),
            token_ids=row.ids[row.n_prompt :],
            prompt_index=row.prompt_index,
            finish_reason=finish_reason,
            stop_sequence=self._stream.stop_sequence,
            logprobs=self._logprobs,
            sum_logprob=row.sum_logprob,
            score=row.score,
            speculation=row.speculation,
            timings=Timings(
                row.n_prompt, timer.reused_tokens, prompt_seconds, row.n_generated, seconds, timer.cache_bytes
            ),
        )
