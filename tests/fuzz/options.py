"""Options as NumPy scalars of every width: the result is that of the same number in Python, or one sentence."""

import math
import warnings

import numpy as np

import minigen
from minigen.options import CONFIGS, OPTIONS, declared
from tests.fuzz.common import Run, check_sentence, require, still_clock, write

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, np.longdouble]
WHOLE = [*range(9), 40, 63, 64, 127, 128, 200, 255, 256, 257, 2**15, 2**31, 2**53 + 1, 2**63, 2**64 - 1]
WHOLE += [-1, -128, -(2**63)]
REAL = [0.0, -0.0, 1.0, 0.5, 0.3, 0.9, 1.5, -0.5, 2.0, 3.0, 1e-8, 1e-30, 1e30, 6e4, math.inf, -math.inf, math.nan]
TEXTS = ["auto", "coupled", "rejection", "never", "a", "", "\xe9", "7"]
CONFIG_OF = {name: config for config in CONFIGS for name in declared(config)}
# What an option goes with: others that it needs before it does anything.
NEEDS = {
    "keep": {"context_shift": True},
    "length_penalty": {"num_beams": 2},
    "early_stopping": {"num_beams": 2},
    "speculation_rule": {"prompt_lookup_num_tokens": 2},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 2},
}
SMALL = {"max_tokens": 30, "num_return_sequences": 9, "num_beams": 9}  # or a run takes too long


def plain(value):
    """The same value without NumPy."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, np.ndarray):
        return plain(value[()]) if value.ndim == 0 else [plain(item) for item in value]
    for kind, python in ((np.bool_, bool), (np.integer, int), (np.floating, float), (np.str_, str)):
        if isinstance(value, kind):
            return python(value)
    return value


def spellings(value):
    """How a sentence may write a value, or what is in it."""
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in spellings(item)]
    items = value if isinstance(value, list | tuple) else []
    return [*(text for item in items for text in spellings(item)), repr(value), repr(plain(value))]


def outcome(call):
    """(the result, None), or (None, the ValueError); no warning of NumPy's may come."""
    with still_clock(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call(), None
        except ValueError as error:
            found = None, error
    require(not caught, f"warnings: {[str(warning.message) for warning in caught]}")
    return found


class Options(Run):
    """NumPy scalars, and arrays of no dimension, as options of generate, stream, Session, score and the configs."""

    def __init__(self, folder):
        super().__init__(folder)
        self.loaded = minigen.load(self.model)

    def scalar(self, rng, whole=0.5):
        """A number of NumPy's; `whole` is the share of integers."""
        usual = rng.random() < 0.6
        if rng.random() < whole:
            kind = rng.choice(INTEGERS)
            info = np.iinfo(kind)
            return kind(
                rng.choice([number for number in WHOLE[: 5 if usual else None] if info.min <= number <= info.max])
            )
        with np.errstate(over="ignore", under="ignore"):
            return rng.choice(FLOATS)(rng.choice([0.3, 0.5, 0.9, 1.0] if usual else [*REAL, 2.0, 3.0, 4.0]))

    def value(self, name, rng):
        if name == "logit_bias":
            keys = [lambda: self.scalar(rng, 1), lambda: np.str_(rng.choice(TEXTS[4:])), lambda: self.scalar(rng)]
            return {rng.choice(keys)(): self.scalar(rng, 0.3) for _ in range(rng.randint(1, 2))}
        if name == "stop":
            texts = [np.str_(rng.choice(TEXTS[4:])) for _ in range(rng.randint(1, 2))]
            return rng.choice([texts, tuple(texts), texts[0], np.array(texts), np.array(texts[0])])
        default, odd = OPTIONS[name].default, rng.random()
        if odd < 0.1:
            return rng.choice([np.True_, np.False_, np.str_(rng.choice(TEXTS)), np.array([1, 2]), np.array([])])
        if isinstance(default, str) or (name == "early_stopping" and odd < 0.3):
            return np.str_(rng.choice(TEXTS))
        number = (
            np.bool_(odd < 0.5)
            if isinstance(default, bool)
            else self.scalar(rng, 0.3 if isinstance(default, float) else 0.9)
        )
        return np.array(number) if rng.random() < 0.1 else number

    def run(self, rng):
        names = [name for name in OPTIONS if name != "logits_processors"]
        chosen = rng.sample(names, rng.choice([1, 1, 1, 2, 3]))
        given = {name: self.value(name, rng) for name in chosen}
        for name, value in given.items():
            if name in SMALL and not isinstance(value, np.ndarray | str) and not plain(value) <= SMALL[name]:
                given[name] = type(value)(SMALL[name])
        fixed = {"temperature": 0.9, "max_tokens": 5, "seed": 7}
        if "num_beams" in given or not {"length_penalty", "early_stopping"}.isdisjoint(given):
            del fixed["temperature"]
        for name in chosen:
            fixed |= NEEDS.get(name, {}) if rng.random() < 0.9 else {}
        draft = (
            self.loaded
            if not {"num_draft_tokens", "draft_vocab_size"}.isdisjoint(given) and rng.random() < 0.9
            else None
        )
        write(self.input, {"options.txt": f"{given!r} beside {fixed}, draft {draft is not None}".encode()})
        way = rng.choice(["generate", "generate", "stream", "session", "config", "score", "trace"])
        return getattr(self, f"run_{way}")(given, fixed, draft, rng)

    def compare(self, given, wanted, found):
        """What came of the options as they are, and of the same numbers in Python."""
        (wanted, refused), (found, error) = wanted, found
        if error is None:
            require(refused is None, f"accepted {given}, which Python's numbers are not: {refused}")
            require(repr(found) == repr(wanted), f"{given} gave {found} instead of {wanted}")
            return "same"
        if str(error) != str(refused):
            check_sentence(error, *given)
            require(
                any(text[:100] in str(error) for text in spellings(list(given.values()))), f"names no value: {error}"
            )
        odd = any(isinstance(value, np.ndarray | np.bool_) for value in given.values())
        require(refused is not None or odd, f"refused {given}: {error}")
        return "refused"

    def both(self, given, call):
        return self.compare(given, outcome(lambda: call(plain(given))), outcome(lambda: call(given)))

    def run_generate(self, given, fixed, draft, rng):
        ids = [rng.choice(INTEGERS)(rng.randrange(128)) for _ in range(3)]

        def call(options):
            prompts = [ids if options is given else plain(ids)]
            return minigen.generate(*self.loaded, prompts, draft_model=draft, **fixed | options)

        return self.both(given, call)

    def run_stream(self, given, fixed, draft, rng):
        return self.both(
            given, lambda options: list(minigen.stream(*self.loaded, "ab", draft_model=draft, **fixed | options))
        )

    def run_session(self, given, fixed, draft, rng):
        def call(options):
            session = minigen.Session(*self.loaded, draft_model=draft, **fixed | options)
            turns = [list(session.turn(text)) for text in ("a", "b")]
            return turns, session.ids, session.copy().seed

        return self.both(given, call)

    def run_config(self, given, fixed, draft, rng):
        name = rng.choice(sorted(given))
        return self.both({name: given[name]}, lambda options: CONFIG_OF[name](**options))

    def run_score(self, given, fixed, draft, rng):
        ids = [rng.choice(INTEGERS)(rng.randrange(128)) for _ in range(100)]

        def call(options):
            scored = minigen.score(self.loaded[0], ids if options is given else plain(ids), **options)
            return scored, scored.perplexity, scored.bits_per_byte(self.loaded[1])

        given = {"stride": self.scalar(rng, 0.8)}
        return self.both(given, call)

    def run_trace(self, given, fixed, draft, rng):
        def call(options):
            done = minigen.trace(*self.loaded, "ab", draft_model=draft, **fixed | options)
            return done.page[-200_000:], list(done)

        return self.both(given, call)
