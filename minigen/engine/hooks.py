"""What a decoder tells whoever watches its run. A decoder holds a `Hooks` and calls it; these calls do nothing.

tracing.py has the one that writes everything down. Nothing a hooks is given is made for it: these are the arrays and
objects of the run, which a hooks may read and copy. It may wrap a row's generator, and change nothing else.
"""


class Hooks:
    """A hooks that looks away. Methods are called in the order in which things happen."""

    # What `GPT2.forward` is handed as `attention_hook`; None, so that the model's layers do not even call.
    attention_hook = None

    def began(self, rows, sampling, config):
        """A decoder starts on these `Row`s, with a `SamplingConfig` and a `DecodingConfig`."""

    def fed(self, cache):
        """A forward pass of the model has run, and `cache` has taken in its tokens."""

    def changed(self, cache, reason):
        """The cache is another, but not by a forward pass: "restored", "rolled back" or "shifted"."""

    def drafted(self, row, tokens):
        """`tokens` were proposed to follow `row.context`; the pass that checks them comes next."""

    def chose(self, row, logits, p, token, draft=None):
        """`token` was chosen by the distribution p, float64 [V], that `sampler.probs` made of `logits`, [V].

        It is told before `row` takes the token. draft: (proposed token, its q float64 [V], whether it was accepted)
        where there was a proposal for this place.
        """

    def searched(self, beams, logits, candidates, kept, finished):
        """A step of beam search, before its `kept` candidates become the next beams.

        beams: lists of generated ids, logits: [B, V], candidates: all `Candidate`s, best first, finished: the best
        `Hypothesis`es so far, best first.
        """
