"""Tracing hooks: callbacks that the decoders call during a run. By default they do nothing.

tracing/recorder.py overrides all of them. The arguments are the run's own arrays and objects: hooks may read and copy
them, but must not change them.
"""


class Hooks:
    """Callbacks of a run; here all of them do nothing."""

    # Passed to `GPT2.forward` as `attention_hook`; None, so that the layers skip the call.
    attention_hook = None

    def on_start(self, run, rows):
        """A decoder starts on these `Sequence`s, all with the options of one `Run`."""

    def on_forward(self, cache):
        """A forward pass has run, and the `KVCache` now holds its tokens."""

    def on_cache_change(self, cache):
        """Before the passes of `PrefixCache.feed`: the `KVCache` after any restore, reorder and rollback."""

    def on_draft(self, row, tokens):
        """`tokens` were proposed as the continuation of `row.context`; the pass that verifies them comes next."""

    def on_token(self, row, logits, p, token, draft=None):
        """`token` was chosen from p, float64 [V], the distribution that the sampler made of `logits`, [V].

        Called before `row` appends the token. draft: the `Draft` for this position, or None if there was none.
        """

    def on_beam_step(self, beams, logits, candidates, kept, finished):
        """A step of beam search, before its `kept` candidates become the next beams.

        beams: lists of generated ids, logits: [B, V], candidates: all `Candidate`s, best first, finished: the best
        `Hypothesis`es so far, best first.
        """


NO_HOOKS = Hooks()
