"""Every option of a run, once: its type, range and default."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from minigen.engine.validation import is_int, is_number, require, to_python_numbers


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. The comment behind each field gives its range and the value that switches it off.

    Raises ValueError, naming field, value and range.
    """

    temperature: float = 0.7  # >= 0; 0 takes the most probable token, 1 leaves the model's distribution as it is
    top_k: int = 0  # >= 0: keep the k most probable; 0 keeps all
    top_p: float = 0.9  # 0 to 1: keep each token before which, most probable first, there is less; 1 keeps all
    min_p: float = 0.0  # 0 to 1: keep what has at least this fraction of the best one's probability; 0 keeps all
    typical_p: float = 1.0  # above 0, to 1: as top_p, but the most typical tokens first; 1 keeps all
    repetition_penalty: float = 1.0  # 1e-30 to 1e30: above 1 makes tokens of prompt and output less likely; 1 is off
    presence_penalty: float = 0.0  # taken off the logit of each token of the output; 0 is off
    frequency_penalty: float = 0.0  # taken off as often as the token stands in the output; 0 is off
    no_repeat_ngram_size: int = 0  # >= 0: no run of this many tokens comes twice; 0 is off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit; -inf bans it
    min_tokens: int = 0  # >= 0: no end-of-text before this many generated tokens; 0 is off
    ignore_eos: bool = False  # no end-of-text at all
    eos_ids: tuple[int, ...] = ()  # the model's end-of-text ids, which the two options above ban
    logits_processors: tuple[Callable, ...] = ()  # each (history, logits [V]) -> logits [V]

    def __post_init__(self):
        to_python_numbers(self)
        for name in ("top_k", "no_repeat_ngram_size", "min_tokens"):
            value = getattr(self, name)
            require(is_int(value, 0), name, value, "a whole number of 0 or more (0 is off)")
        for name, allowed, in_range in (
            ("temperature", "a number of 0 or more (0 takes the most probable token)", lambda value: value >= 0),
            ("top_p", "a number from 0 to 1 (1 is off)", lambda value: 0 <= value <= 1),
            ("min_p", "a number from 0 to 1 (0 is off)", lambda value: 0 <= value <= 1),
            ("typical_p", "a number above 0, up to 1 (1 is off)", lambda value: 0 < value <= 1),
            # Up to 1e30, logits stay within float32 whatever these do to them.
            ("repetition_penalty", "a number from 1e-30 to 1e30 (1 is off)", lambda value: 1e-30 <= value <= 1e30),
            ("presence_penalty", "a number from -1e30 to 1e30 (0 is off)", lambda value: abs(value) <= 1e30),
            ("frequency_penalty", "a number from -1e30 to 1e30 (0 is off)", lambda value: abs(value) <= 1e30),
        ):
            value = getattr(self, name)
            require(is_number(value) and in_range(value), name, value, allowed)
        bias = self.logit_bias
        require(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token ids to numbers")
        for token, value in bias.items():
            require(is_int(token, 0), "a key of logit_bias", token, "a token id of 0 or more")
            ok = (is_number(value) and abs(value) <= 1e30) or value == -math.inf
            allowed = "a number from -1e30 to 1e30, or -inf to ban the token"
            require(ok, f"the logit_bias of token {token}", value, allowed)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        ok = isinstance(self.logits_processors, tuple | list) and all(map(callable, self.logits_processors))
        require(ok, "logits_processors", self.logits_processors, "a list of callables (history, logits) -> logits")


@dataclass(frozen=True)
class DecodingConfig:
    """How far a text goes and how it is run. Raises ValueError, naming field, value and range."""

    max_tokens: int = 100  # >= 0: the most tokens to generate
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    seed: int | None = None  # >= 0; None takes a random one
    num_return_sequences: int = 1  # >= 1: continuations of each prompt
    logprobs: int | None = None  # >= 0: report log-probabilities, and those of this many best tokens; None is off
    use_cache: bool = True  # False runs the whole text again for every token
    window: int | None = None  # >= 1: each token sees only the last `window`; None: all before it
    context_shift: bool = False  # at n_positions drop the older half of the text and go on
    keep: int = 0  # >= 0: the first ids that a context shift never drops

    def __post_init__(self):
        to_python_numbers(self)
        for name, least, optional in (
            ("max_tokens", 0, False),
            ("seed", 0, True),
            ("num_return_sequences", 1, False),
            ("logprobs", 0, True),
            ("window", 1, True),
            ("keep", 0, False),
        ):
            value = getattr(self, name)
            allowed = f"a whole number of {least} or more" + (", or None" if optional else "")
            require((optional and value is None) or is_int(value, least), name, value, allowed)
        require(isinstance(self.stop, tuple), "stop", self.stop, "a text or a list of texts")
        for stop in self.stop:
            require(isinstance(stop, str) and stop, "stop", stop, "a text of one character or more, or a list of such")
        for name in ("use_cache", "context_shift"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")


@dataclass(frozen=True)
class BeamConfig:
    """The options of beam search. Raises ValueError, naming field, value and range."""

    num_beams: int = 1  # >= 1: partial texts that are kept; 1 is no beam search
    length_penalty: float = 1.0  # 0 ranks by the sum, which favours short texts; larger values favour longer ones
    early_stopping: bool | str = False  # True: stop at num_beams finished texts; False: when the best unfinished one
    # would lose if it ended now; "never": when it could not win at any length

    def __post_init__(self):
        to_python_numbers(self)
        require(is_int(self.num_beams, 1), "num_beams", self.num_beams, "a whole number of 1 or more")
        # Within these, length ** length_penalty is a number for every length.
        ok = is_number(self.length_penalty) and abs(self.length_penalty) <= 10
        require(ok, "length_penalty", self.length_penalty, "a number from -10 to 10")
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(ok, "early_stopping", self.early_stopping, 'True, False or "never"')


@dataclass(frozen=True)
class SpeculationConfig:
    """The options of speculation. Raises ValueError, naming field, value and range."""

    num_draft_tokens: int | str = 4  # >= 1, or "auto": tokens a draft model proposes for each pass of the target
    prompt_lookup_num_tokens: int = 0  # >= 0: propose so many tokens from the text itself, without a model; 0 is off
    speculation_rule: str = "coupled"  # "coupled": the text is that of plain decoding; "rejection": accepts more drafts
    max_matching_ngram_size: int = 2  # >= 1: the longest end of the text that is looked up in it

    def __post_init__(self):
        to_python_numbers(self)
        ok = self.num_draft_tokens == "auto" or is_int(self.num_draft_tokens, 1)
        require(ok, "num_draft_tokens", self.num_draft_tokens, 'a whole number of 1 or more, or "auto"')
        ok = is_int(self.prompt_lookup_num_tokens, 0)
        require(ok, "prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, "a whole number of 0 or more (0 is off)")
        ok = self.speculation_rule in ("coupled", "rejection")
        require(ok, "speculation_rule", self.speculation_rule, '"coupled" or "rejection"')
        ok = is_int(self.max_matching_ngram_size, 1)
        require(ok, "max_matching_ngram_size", self.max_matching_ngram_size, "a whole number of 1 or more")
