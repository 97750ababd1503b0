"""Every option of a run, declared once: range, default, what it does, and what uses it.

The declarations give the checks, the error messages, the command's flags and help page, and the signature and docstring
of `minigen.generate`: an option that is added to one of the four configs is in all of these.
"""

import inspect
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from string import Formatter
from types import SimpleNamespace
from typing import Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from minigen.engine.validation import is_int, is_number, short_repr

Function = TypeVar("Function", bound=Callable)
MAX_COUNT = 10**40  # the largest whole number that an option may be: seeds have up to 128 bits

# ---------------------------------------------------------------------------------------- errors


class OptionError(ValueError):
    """An option that cannot be used. The message is made when it is printed; `str` names options as Python does.

    template: {name} stands for the option `name`, {0}, {1} ... for `values`.
    """

    def __init__(self, template, *values):
        super().__init__(template, *values)
        self.template, self.values = template, values

    def __str__(self):
        return self.render({})

    def render(self, names, spell=short_repr):
        """The message with options named by the mapping `names`, and values as `spell` writes them."""
        # Python does not print whole numbers of more than 4,300 digits.
        huge = "a number of thousands of digits"
        values = [huge if is_int(value) and abs(value) > 10**4000 else spell(value) for value in self.values]
        return Formatter().vformat(self.template, values, _Names(names))


class _Names(dict):
    """Option -> the name to show; any other option is shown by its Python keyword."""

    def __missing__(self, name):
        return name


def require(ok, name, value, allowed):
    """Raise OptionError unless `ok`: "<name> is <value>; it must be <allowed>"."""
    if not ok:
        raise OptionError(f"{{{name}}} is {{0}}; it must be {allowed}", value)


# ---------------------------------------------------------------------------------------- what an option may be


class Kind(NamedTuple):
    """The values of an option: in words, as a test, and how they are read from the command line."""

    allowed: str
    contains: Callable[[object], bool]  # may itself raise an OptionError that says more than `allowed`
    parse: Callable[[str], object] | None = str  # None: a switch, which takes no value
    off: float | None = None  # the value at which the option does nothing, if there is one
    repeatable: bool = False


def _parser(convert):
    """Converts typed text to a value. What cannot be converted stays text, which the range check refuses."""

    def parse(text):
        try:
            return convert(text)
        except ValueError:
            return text

    return parse


def _off(value):
    return "" if value is None else f" ({value} is off)"


def whole(least, off=None):
    """Whole numbers of `least` or more."""
    allowed = f"a whole number of {least} or more{_off(off)}"
    return Kind(allowed, lambda value: is_int(value, least), _parser(int), off)


def real(least, most=math.inf, off=None):
    """Real numbers from `least` to `most`."""
    allowed = f"of {least} or more" if most == math.inf else f"from {least:g} to {most:g}".replace("e+", "e")
    return Kind(
        f"a number {allowed}{_off(off)}", lambda value: is_number(value) and least <= value <= most, _parser(float), off
    )


def _is_word(value, *words):
    return isinstance(value, str) and value in words  # comparing an array with a text gives an array


def _are_stops(value):
    for text in value if isinstance(value, list | tuple) else [value]:
        require(isinstance(text, str) and text, "stop", text, STOPS.allowed)
    return True


def _check_bias(token, bias):
    bias = as_python(bias)
    if not (is_number(bias) and abs(bias) <= 1e30) and not (isinstance(bias, float) and bias == -math.inf):
        allowed = "a number from -1e30 to 1e30, or -inf to ban the token"
        raise OptionError(f"{{logit_bias}} of token {{0}} is {{1}}; it must be {allowed}", token, bias)


def _parse_bias(text):
    """ID+BIAS, ID-BIAS, or TOKEN=BIAS with a token's text -> (id or text, bias)."""
    match = re.fullmatch(r"(\d+)([+-].+)", text, re.ASCII) or re.fullmatch(r"(.+)=([^=]+)", text, re.DOTALL)
    try:
        token, bias = match.groups()
        return int(token) if match.re.flags & re.ASCII else token, float(bias)
    except (AttributeError, ValueError):
        allowed = "ID+BIAS, ID-BIAS or TEXT=BIAS, such as 262-5, 262-inf or ' the'=1.5"
        raise OptionError(f"{{logit_bias}} is {{0}}; it must be {allowed}", text) from None


def _is_bias(value):
    for token, bias in value.items() if isinstance(value, Mapping) else ():
        if not is_int(token, 0):
            raise OptionError("{logit_bias} names token {0}; it must be a token id of 0 or more", token)
        _check_bias(token, bias)
    return isinstance(value, Mapping)


def _are_processors(value):
    return isinstance(value, list | tuple) and all(map(callable, value))


SWITCH = Kind("True or False", lambda value: isinstance(value, bool), None)
STOPS = Kind("a text of one character or more, or a list of such texts", _are_stops, repeatable=True)
BIAS = Kind("a mapping from tokens to numbers", _is_bias, _parse_bias, repeatable=True)
PROCESSORS = Kind("a list of callables (history, logits) -> logits", _are_processors)
TYPICAL = Kind(
    "a number above 0, up to 1 (1 is off)", lambda value: is_number(value) and 0 < value <= 1, _parser(float), 1
)
RULE = Kind('"coupled" or "rejection"', lambda value: _is_word(value, "coupled", "rejection"))
EARLY_STOPPING = Kind(
    'True, False or "never"',
    lambda value: isinstance(value, bool) or _is_word(value, "never"),
    lambda text: {"true": True, "false": False}.get(text.lower(), text),
)

# ---------------------------------------------------------------------------------------- what an option is


def as_python(value):
    """A NumPy scalar as the Python value it holds: a uint8 would overflow later on. Other values stay as they are."""
    kinds = ((np.integer, int), (np.floating, float), (np.str_, str))
    return next((python(value) for numpy, python in kinds if isinstance(value, numpy)), value)


class Option(NamedTuple):
    """The declaration of an option."""

    default: object
    kind: Kind
    metavar: str | None
    group: str | None  # its heading on the help page; None: it exists only in Python
    used_by: str | None  # a key of USERS; None: every run
    flags: str  # besides --its-name: short forms, and other engines' names
    help: str  # what it does

    def check(self, name, value):
        """The value as plain Python. Raises OptionError if it is out of range."""
        value = as_python(value)
        if value is None and self.default is None:
            return None
        require(self.kind.contains(value), name, value, self.kind.allowed)
        require(not is_int(value) or value <= MAX_COUNT, name, value, "at most 10**40")
        if isinstance(value, Mapping):
            return {int(token): float(bias) for token, bias in value.items()}
        if self.kind is STOPS and isinstance(value, str):
            return (value,)
        return tuple(map(as_python, value)) if isinstance(value, list | tuple) else value

    def is_neutral(self, value):
        """Whether the value has no effect, so that it conflicts with no other option."""
        return value is None or value == (self.default if self.kind is SWITCH else self.kind.off)


def option(default, kind, metavar=None, group=None, used_by=None, flags="", *, help):
    """A dataclass field with the declaration of an option."""
    value = {"default_factory": dict} if default == {} else {"default": default}
    return field(**value, metadata={"option": Option(default, kind, metavar, group, used_by, flags, help)})


def declared(config):
    """{name: Option} of a config."""
    return {item.name: item.metadata["option"] for item in fields(config) if item.metadata}


class Config:
    """Base of the configs. Checks every option; raises OptionError, which names the option, its value and its range."""

    def __post_init__(self):
        for name, declaration in declared(self).items():
            object.__setattr__(self, name, declaration.check(name, getattr(self, name)))


# ---------------------------------------------------------------------------------------- the options
# fmt: off


@dataclass(frozen=True)
class SamplingConfig(Config):
    """How the next token is chosen. sampler.py gives the order in which the filters are applied."""

    temperature: float = option(0.7, real(0), "T", "sampling", "sampling", "--temp",
        help="0 is greedy decoding; below 1 sharpens the distribution, above 1 flattens it")
    top_k: int = option(0, whole(0, off=0), "K", "sampling", "sampling",
        help="top-k sampling: keep the K most probable tokens")
    top_p: float = option(0.9, real(0, 1, off=1), "P", "sampling", "sampling",
        help="nucleus sampling: keep the smallest set of most probable tokens with total probability P")
    min_p: float = option(0.0, real(0, 1, off=0), "P", "sampling", "sampling",
        help="keep tokens at least P times as probable as the most probable one")
    typical_p: float = option(1.0, TYPICAL, "P", "sampling", "sampling",
        help="locally typical sampling: as top-p, but tokens of average information content come first")
    # Up to 1e30, logits stay within float32 whatever the penalties do to them.
    repetition_penalty: float = option(1.0, real(1e-30, 1e30, off=1), "X", "sampling", None, "--repeat-penalty",
        help="above 1, tokens that occur in the prompt or the output become less likely")
    presence_penalty: float = option(0.0, real(-1e30, 1e30, off=0), "X", "sampling",
        help="subtract X from the logit of each token that occurs in the output")
    frequency_penalty: float = option(0.0, real(-1e30, 1e30, off=0), "X", "sampling",
        help="subtract X for each occurrence of the token in the output")
    no_repeat_ngram_size: int = option(0, whole(0, off=0), "N", "sampling",
        help="never generate the same n-gram (N tokens in a row) twice")
    logit_bias: Mapping[int, float] = option({}, BIAS, "ID+BIAS", "sampling",
        help="add BIAS to the logit of a token, named by id or as TEXT=BIAS; -inf bans the token")
    min_tokens: int = option(0, whole(0, off=0), "N", "length",
        help="no end-of-text token before N generated tokens")
    ignore_eos: bool = option(False, SWITCH, group="length",
        help="never generate the end-of-text token")
    eos_ids: tuple[int, ...] = ()  # the model's end-of-text ids, which the two options above ban
    logits_processors: Sequence[Callable] = option((), PROCESSORS,
        help="functions (history, logits [V]) -> logits [V], called before the temperature is applied")


@dataclass(frozen=True)
class DecodingConfig(Config):
    """Generation length, stopping, batching and cache options."""

    max_tokens: int = option(100, whole(0), "N", "length", None, "-n --max-new-tokens --n-predict",
        help="generate at most N tokens")
    stop: Sequence[str] = option((), STOPS, "TEXT", "length", None, "--reverse-prompt",
        help="end the text before this string")
    seed: int | None = option(None, whole(0), "N", "sampling", None, "-s",
        help="the same seed gives the same text; if you give none, one is chosen at random")
    num_return_sequences: int = option(1, whole(1), "N", "length",
        help="continuations of each prompt")
    logprobs: int | None = option(None, whole(0), "N", "output",
        help="report each token's log-probability, and the N most probable tokens with theirs")
    use_cache: bool = option(True, SWITCH, None, "cache", None, "--no-cache",
        help="no K/V cache: run the whole text again for each token (slow)")
    window: int | None = option(None, whole(1), "W", "cache",
        help="sliding-window attention: each token sees only the last W tokens")
    context_shift: bool = option(False, SWITCH, group="cache",
        help="if the text fills the model's context, drop its older half and go on")
    keep: int = option(0, whole(0, off=0), "N", "cache", "shift",
        help="with context shift: never drop the first N tokens")


@dataclass(frozen=True)
class BeamConfig(Config):
    """The options of beam search."""

    num_beams: int = option(1, whole(1, off=1), "N", "beam search",
        help="beam search: keep the N most probable partial texts")
    # Within this range, length ** length_penalty is a finite number for every length.
    length_penalty: float = option(1.0, real(-10, 10), "X", "beam search", "beams",
        help="rank by log-probability / length ** X: 0 favours short texts, larger X longer ones")
    early_stopping: bool | Literal["never"] = option(False, EARLY_STOPPING, "WHEN", "beam search", "beams",
        help="true: stop at N finished texts; false: if no other text looks better; never: if none can become better")


@dataclass(frozen=True)
class SpeculationConfig(Config):
    """The options of speculative decoding."""

    num_draft_tokens: int = option(2, whole(1), "N", "speculative decoding", "draft model",
        help="tokens that the draft model proposes per round")
    draft_vocab_size: int | None = option(None, whole(1), "N", "speculative decoding", "draft model",
        help="the draft model proposes only the first N tokens of the vocabulary, which is faster")
    prompt_lookup_num_tokens: int = option(0, whole(0, off=0), "N", "speculative decoding",
        help="without a draft model: propose N tokens by n-gram lookup in the text so far")
    speculation_rule: Literal["coupled", "rejection"] = option(
        "coupled", RULE, "RULE", "speculative decoding", "drafts",
        help="coupled: the text is the one without drafts; rejection: accepts more, and gives another text")
    max_matching_ngram_size: int = option(2, whole(1), "N", "speculative decoding", "lookup",
        help="longest n-gram that the lookup matches")


# fmt: on


CONFIGS = (SamplingConfig, DecodingConfig, BeamConfig, SpeculationConfig)
OPTIONS = {name: declaration for config in CONFIGS for name, declaration in declared(config).items()}


class GenerateOptions(TypedDict, total=False):
    """`OPTIONS` for editors and type checkers, which do not run the code above."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int | str, float]  # a token may also be named by its text
    min_tokens: int
    ignore_eos: bool
    logits_processors: Sequence[Callable]
    max_tokens: int
    stop: str | Sequence[str] | None
    seed: int | None
    num_return_sequences: int
    logprobs: int | None
    use_cache: bool
    window: int | None
    context_shift: bool
    keep: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_draft_tokens: int
    draft_vocab_size: int | None
    prompt_lookup_num_tokens: int
    speculation_rule: Literal["coupled", "rejection"]
    max_matching_ngram_size: int


# ---------------------------------------------------------------------------------------- which options go together

# What may use an option -> (whether a run has it, what an error says if not).
USERS = {
    "sampling": (lambda run: not run.beams, "beam search does not use it: leave it out"),
    "beams": (lambda run: run.beams, "only beam search uses it: set {num_beams} to 2 or more"),
    "drafts": (lambda run: run.drafts, "only speculative decoding uses it: leave it out"),
    "draft model": (lambda run: run.draft_model, "there is no draft model: give one as well"),
    "lookup": (lambda run: run.lookup, "only prompt lookup uses it: set {prompt_lookup_num_tokens} as well"),
    "shift": (lambda run: run.shift, "only {context_shift} uses it: set that as well"),
}
# (option, whether a run cannot have it, what an error says).
CONFLICTS = (
    ("num_beams", lambda run: run.drafts, "it cannot be combined with speculative decoding: use one of the two"),
    ("context_shift", lambda run: run.beams, "beam search cannot use it: leave it out"),
    ("prompt_lookup_num_tokens", lambda run: run.draft_model, "there is also a draft model: use one of the two"),
    ("num_return_sequences", lambda run: run.drafts and run.n > 1, "speculative decoding generates one text at a time"),
    ("use_cache", lambda run: run.drafts, "speculative decoding needs the K/V cache"),
    ("use_cache", lambda run: run.cached, "a prompt cache needs the K/V cache"),
    ("window", lambda run: run.cached, "a prompt cache keeps the whole prompt: use one of the two"),
    *((name, lambda run, has=USERS[option.used_by][0]: not has(run), USERS[option.used_by][1])
      for name, option in OPTIONS.items() if option.used_by),
)  # fmt: skip


def check_conflicts(conflicts, given, run):
    """Raise OptionError for the first of the conflicts, (option, test of the run, why), whose option is given."""
    for name, conflicts_with, reason in conflicts:
        if name in given and conflicts_with(run):
            raise OptionError(f"{{{name}}} is {{0}}, but {reason}", given[name])


# ---------------------------------------------------------------------------------------- the options of a run


class Options(NamedTuple):
    """The checked options of a run, by the part of the engine that uses them."""

    sampling: SamplingConfig
    decoding: DecodingConfig
    beam: BeamConfig
    speculation: SpeculationConfig


def _bias_by_id(logit_bias, model, tokenizer):
    """logit_bias with texts replaced by the ids of their tokens; without a tokenizer, texts are left out."""
    by_id = {}
    for token, bias in logit_bias.items():
        if isinstance(token, str):
            _check_bias(token, bias)
            if tokenizer is None:
                continue
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise OptionError("{logit_bias} names {0}, which is {1} tokens, not one", token, len(ids))
            token = ids[0]
        if model is not None and not (is_int(token, 0) and token < model.config.vocab_size):
            allowed = f"a token id of 0 to {model.config.vocab_size - 1}, or the text of a token"
            raise OptionError(f"{{logit_bias}} names token {{0}}; it must be {allowed}", token)
        by_id[token] = bias
    return by_id


def check_options(options, *, drafts=False, cached=False, model=None, tokenizer=None):
    """The `Options` that these keywords make, with a random seed if they have none.

    drafts, cached: whether there is a draft model, and whether there is a prompt cache. Without a model and its
    tokenizer, texts in logit_bias are left out, and what depends on the model is not checked.

    Raises TypeError for an unknown name, OptionError for a value out of range or options that do not go together.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"there is no option {name!r}; the options are {', '.join(sorted(OPTIONS))}")
    options = dict(options)
    if options.get("stop") is None:
        options["stop"] = ()
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(32)
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = _bias_by_id(options["logit_bias"], model, tokenizer)
    parts = (config(**{name: options[name] for name in declared(config) if name in options}) for config in CONFIGS)
    sampling, decoding, beam, speculation = parts

    n, num_beams, lookup = decoding.num_return_sequences, beam.num_beams, speculation.prompt_lookup_num_tokens > 0
    run = SimpleNamespace(n=n, beams=num_beams > 1, draft_model=drafts, lookup=lookup, drafts=drafts or lookup)
    run.cached, run.shift = cached, decoding.context_shift
    if run.beams:
        require(n <= num_beams, "num_return_sequences", n, f"at most {{num_beams}}, {num_beams}")
    given = {name: value for name, value in options.items() if not OPTIONS[name].is_neutral(value)}
    check_conflicts(CONFLICTS, given, run)
    if model is not None:
        # If more than half of the context were kept, each shift would make room for only a few tokens.
        n_positions = model.config.n_positions
        allowed = f"less than half the model's context of {n_positions} tokens with {{context_shift}}"
        require(not run.shift or decoding.keep < n_positions / 2, "keep", decoding.keep, allowed)
        sampling = replace(sampling, eos_ids=model.config.eos_ids)
    return Options(sampling, decoding, beam, speculation)


PARTS = {"model": ("config", "forward"), "tokenizer": ("encode", "token_bytes")}


def is_loaded(name, value):
    """Whether a value can serve as a "model" or "tokenizer": any object with the attributes that every run uses."""
    return not isinstance(value, type) and all(hasattr(value, part) for part in PARTS[name])


def check_loaded(**objects):
    """Raise TypeError if `model=` or `tokenizer=` is something else, such as a name."""
    for name, value in objects.items():
        if not is_loaded(name, value):
            kind = type(value).__name__
            source = short_repr(os.fspath(value)) if isinstance(value, str | os.PathLike) else ""
            raise TypeError(
                f"{name} is {short_repr(value)}, {'an' if kind[0] in 'aeiou' else 'a'} {kind}; load it first: "
                f"model, tokenizer = minigen.load({source})"
            )


def takes_options(function: Function) -> Function:
    """Decorator: adds every option to the signature and the docstring of a function that takes **options."""
    signature = inspect.signature(function)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default) for name in OPTIONS
    ]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])
    lines = [
        f"{name}: {option.kind.allowed}{', or None' if option.default is None else ''}, default {option.default!r}. "
        f"{'False: ' if option.default is True else ''}{option.help}."
        for name, option in OPTIONS.items()
    ]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *(f"    {line}" for line in lines)])
    return function
