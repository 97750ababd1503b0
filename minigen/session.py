"""Interactive sessions: a text that grows turn by turn, with a K/V cache kept between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minigen.api import exclusive, stream
from minigen.engine.decode import PrefixCache, shift_context
from minigen.options import OptionError, check_loaded, check_options, require, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigen.options import GenerateOptions


class Session:
    """A text, the options with which a model continues it, and the K/V cache of what the model has read of it.

    draft_model, options: as for `stream`, with one continuation at a time. `context` may be read, and set to a list of
    ids; `copy()` branches the session. With a window or use_cache=False nothing is kept between turns: each runs the
    whole text. Raises what `stream` raises for invalid options.
    """

    @takes_options
    def __init__(self, model, tokenizer, *, draft_model=None, **options: Unpack[GenerateOptions]):
        check_loaded(model=model, tokenizer=tokenizer)
        checked = check_options(options, drafts=draft_model is not None, model=model, tokenizer=tokenizer)
        n = checked.decoding.num_return_sequences
        require(n == 1, "num_return_sequences", n, "1 in a session, where each text is the beginning of the next")
        self.model = model
        self.tokenizer = tokenizer
        self.draft_model = draft_model
        self.options = options
        self.config = checked.decoding
        self.cache = PrefixCache(model) if self.config.use_cache and not self.config.window else None
        self.busy = False  # whether a turn is being generated
        self.ids = []  # of the whole text so far
        self.seed = self.config.seed  # the same for all turns: the random numbers depend on the position in the text

    @property
    def context(self):
        """The ids of the text that the model still sees: all of them, or those that remain after context shifts."""
        n_positions = self.model.config.n_positions
        return shift_context(self.ids, n_positions, self.config.keep) if self.config.context_shift else self.ids

    @context.setter
    def context(self, ids):
        self.ids = list(ids)

    def copy(self):
        """A branch: another session with the same text, options and cache contents. Both go on independently."""
        branch = Session(self.model, self.tokenizer, draft_model=self.draft_model, **self.options)
        branch.seed, branch.ids = self.seed, list(self.ids)
        branch.cache = self.cache and self.cache.copy()
        return branch

    def turn(self, text):
        """Add `text`, and yield a `Step` for each token of the model's continuation, the last with the `Completion`.

        The text is added on a new line; an empty one adds nothing. If the turn is interrupted (exception, closed
        iterator), the text generated so far is kept. The first step raises ValueError, with nothing changed, if the
        text is too long for the model, or the previous turn has not ended.
        """
        return exclusive(self, self._turn(text), "the session")

    def _turn(self, text):
        require(isinstance(text, str), "text", text, "a text")
        n_positions = self.model.config.n_positions
        ids = self.tokenizer.encode("\n" * bool(self.ids and text) + text, add_special_tokens=not self.ids)
        prompt = self.ids + ids
        if len(prompt) > n_positions and not self.config.context_shift:
            raise OptionError(
                f"the text so far has {len(self.ids)} tokens and this turn {len(ids)}; the model takes at most "
                f"{n_positions}: begin a new text, or use {{context_shift}}"
            )
        if not prompt and self.model.config.bos_token_id is not None:
            prompt = [self.model.config.bos_token_id]
        options = self.options | {"seed": self.seed}
        steps = stream(self.model, self.tokenizer, [prompt], draft_model=self.draft_model, cache=self.cache, **options)
        generated, completion = [], None
        try:
            for step in steps:
                generated += [] if step.token is None else [step.token]
                completion = step.completion
                yield step
        finally:
            steps.close()
            self.ids = prompt + (generated if completion is None else self._kept_ids(completion))

    def _kept_ids(self, completion):
        """The generated ids that the next turn goes on from: without EOS or a stop string."""
        ids = completion.token_ids
        if completion.finish_reason == "eos":
            return ids[:-1]
        if completion.finish_reason == "stop":
            without_last = self.tokenizer.decode(ids[:-1])
            if without_last != completion.text:
                return self.tokenizer.encode(completion.text, add_special_tokens=False)
            return ids[:-1]
        return ids
