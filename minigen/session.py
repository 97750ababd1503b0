"""A text that grows turn by turn: someone adds to it, the model goes on, and what it has read stays in the cache."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from minigen.api import stream
from minigen.engine.decode import PrefixCache, exclusive, shifted
from minigen.options import OptionError, check_options, require, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigen.options import GenerateOptions


class Session:
    """A text, the options with which a model continues it, and the keys and values of what the model has read of it.

    draft_model, options: as for `stream`, for one continuation at a time. Beam search, speculation, a window and
    use_cache=False keep nothing between turns: they run the whole text each time. Raises what `stream` raises for
    options that cannot be used.
    """

    @takes_options
    def __init__(self, model, tokenizer, *, draft_model=None, **options: Unpack[GenerateOptions]):
        checked = check_options(options, drafts=draft_model is not None)
        n = checked.decoding.num_return_sequences
        require(n == 1, "num_return_sequences", n, "1 in a session, where each text is the beginning of the next")
        stream(model, tokenizer, [], draft_model=draft_model, **options)
        self.model = model
        self.tokenizer = tokenizer
        self.draft_model = draft_model
        self.options = options
        self.config = checked.decoding
        speculates = draft_model is not None or checked.speculation.prompt_lookup_num_tokens
        keeps = checked.beam.num_beams == 1 and not speculates and self.config.use_cache and not self.config.window
        self.cache = PrefixCache(model) if keeps else None
        self.context = []  # the ids of the text so far, those that a shift has dropped left out
        self.lock = threading.Lock()  # held while a turn is made
        self.next_seed = self.config.seed  # of the next turn: each has one more than the last, so that none repeats it

    def _appended(self, context, ids):
        """The context after these ids, shifted as often as `Row.accept` shifts."""
        context = list(context)
        for token in ids:
            context.append(token)
            if self.config.context_shift and len(context) > self.model.config.n_positions:
                context = shifted(context, self.config.keep)
        return context

    def _visible_ids(self, ids, text):
        """The generated ids as the text was shown: without end-of-text, a stop string, or half a character."""
        for visible in (ids, ids[:-1]):
            if self.tokenizer.decode(visible) == text:
                return visible
        return self.tokenizer.encode(text)

    def turn(self, text):
        """Add `text`, and yield a `Step` for each token with which the model goes on, the last with the `Completion`.

        The text is added on a line of its own, behind a line break; an empty one adds nothing. However the turn ends,
        also by an exception or with the iterator closed, its text so far is part of the session's. The first step
        raises ValueError, with nothing changed, where text and turn are too long for the model, and where the turn
        before has not ended.
        """
        return exclusive(self.lock, self._turn(text), "the session")

    def _turn(self, text):
        require(isinstance(text, str), "text", text, "a text")
        n_positions = self.model.config.n_positions
        ids = self.tokenizer.encode("\n" * bool(self.context and text) + text)
        prompt = self._appended(self.context, ids)
        if len(ids) > n_positions:
            raise ValueError(f"this turn has {len(ids)} tokens; the model takes at most {n_positions}: shorten it")
        if len(prompt) > n_positions:
            raise OptionError(
                f"the text so far has {len(self.context)} tokens and this turn {len(ids)}; the model takes at most "
                f"{n_positions}: begin a new text, or use {{context_shift}}"
            )
        if not prompt and self.model.config.bos_token_id is not None:
            prompt = [self.model.config.bos_token_id]
        options = self.options | {"seed": self.next_seed}
        steps = stream(self.model, self.tokenizer, [prompt], draft_model=self.draft_model, cache=self.cache, **options)
        self.next_seed += 1
        generated, shown = [], ""
        try:
            for step in steps:
                generated += [] if step.token is None else [step.token]
                shown += step.text
                yield step
        finally:
            steps.close()
            self.context = self._appended(prompt, self._visible_ids(generated, shown))
