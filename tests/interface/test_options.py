"""Options: each refuses the same values in its config, in `stream` and on the command line, and is shown everywhere."""

import inspect
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import minigen
from minigen.command import arguments
from minigen.options import CONFIGS, OPTIONS, GenerateOptions, OptionError, check_options, declared

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, np.True_, "x", None, 1j, [0.5]]
NOT_WHOLE = [math.nan, math.inf, True, np.True_, "x", None, 2.5, np.float32(1.5), [1], 10**41, 10**5000]
NOT_SWITCHES = [0, 1, "x", None, np.True_]
# option -> (what else must be given, values out of its range, what the message says is allowed, values in its range).
TABLE = {
    "temperature": ({}, [*NOT_NUMBERS, -1, -1e-300], "a number of 0 or more", [0, 0.0, 1e-38, 1, 100.0]),
    "top_k": ({}, [*NOT_WHOLE, -1], "a whole number of 0 or more (0 is off)", [0, 1, 10**9]),
    "top_p": ({}, [*NOT_NUMBERS, -0.1, 1.0001], "a number from 0 to 1 (1 is off)", [0, 1e-9, 1]),
    "min_p": ({}, [*NOT_NUMBERS, -0.1, 1.1], "a number from 0 to 1 (0 is off)", [0, 1e-9, 1.0]),
    "typical_p": ({}, [*NOT_NUMBERS, -0.1, 0, 0.0, 1.1], "a number above 0, up to 1 (1 is off)", [1e-9, 1]),
    "repetition_penalty": (
        {},
        [*NOT_NUMBERS, -1.5, 0, 9e-31, 1.1e30],
        "a number from 1e-30 to 1e30 (1 is off)",
        [1e-30, 1, 1e30],
    ),
    "presence_penalty": (
        {},
        [*NOT_NUMBERS, 1.1e30, -1.1e30],
        "a number from -1e30 to 1e30 (0 is off)",
        [-1e30, -2, 0, 1e30],
    ),
    "frequency_penalty": ({}, [*NOT_NUMBERS, 1.1e30], "a number from -1e30 to 1e30 (0 is off)", [-1e30, 0.5, 1e30]),
    "no_repeat_ngram_size": ({}, [*NOT_WHOLE, -1], "a whole number of 0 or more (0 is off)", [0, 3]),
    "min_tokens": ({}, [*NOT_WHOLE, -3], "a whole number of 0 or more (0 is off)", [0, 3]),
    "ignore_eos": ({}, NOT_SWITCHES, "True or False", [True, False]),
    "max_tokens": ({}, [*NOT_WHOLE, -1], "a whole number of 0 or more", [0, 10**9]),
    "seed": ({}, [*(v for v in NOT_WHOLE if v is not None), -1], "a whole number of 0 or more", [0, 2**128, None]),
    "num_return_sequences": ({}, [*NOT_WHOLE, 0, -1], "a whole number of 1 or more", [1, 4]),
    "logprobs": ({}, [*(v for v in NOT_WHOLE if v is not None), -1], "a whole number of 0 or more", [0, None]),
    "use_cache": ({}, NOT_SWITCHES, "True or False", [True, False]),
    "window": ({}, [*(v for v in NOT_WHOLE if v is not None), 0, -1], "a whole number of 1 or more", [1, None]),
    "context_shift": ({}, NOT_SWITCHES, "True or False", [True, False]),
    "keep": ({"context_shift": True}, [*NOT_WHOLE, -1], "a whole number of 0 or more (0 is off)", [0, 7]),
    "num_beams": ({}, [*NOT_WHOLE, 0], "a whole number of 1 or more (1 is off)", [1, 4]),
    "length_penalty": ({"num_beams": 2}, [*NOT_NUMBERS, -10.5, 10.5], "a number from -10 to 10", [-10, 0.5, 10]),
    "early_stopping": (
        {"num_beams": 2},
        ["maybe", None, 1, np.True_],
        'True, False or "never"',
        [True, False, "never"],
    ),
    "num_draft_tokens": ({"draft_model": True}, [*NOT_WHOLE, 0, -1], "a whole number of 1 or more", [1, 4]),
    "draft_vocab_size": (
        {"draft_model": True},
        [*(v for v in NOT_WHOLE if v is not None), 0],
        "a whole number of 1 or more",
        [None, 5],
    ),
    "prompt_lookup_num_tokens": ({}, [*NOT_WHOLE, -1], "a whole number of 0 or more (0 is off)", [0, 3]),
    "speculation_rule": (
        {"prompt_lookup_num_tokens": 2},
        ["greedy", None, 1, True],
        '"coupled" or "rejection"',
        ["coupled", "rejection"],
    ),
    "max_matching_ngram_size": (
        {"prompt_lookup_num_tokens": 3},
        [*NOT_WHOLE, 0],
        "a whole number of 1 or more",
        [1, 5],
    ),
    "stop": ({}, ["", [""], ["a", ""], [5], 5, b"a"], "a text of one character or more", ["a", ["a", "b"], ("a",)]),
    "logit_bias": ({}, [None, 5, [5], "a"], "a mapping from tokens to numbers", [{}, {3: 1}, {3: -math.inf, 4: 1e30}]),
    "logits_processors": ({}, [None, 5, [5], abs, [abs, None]], "a list of callables", [(), (abs,), [abs]]),
}
BAD = [(name, value) for name, (_, values, _, _) in TABLE.items() for value in values]
GOOD = [(name, value) for name, (*_, values) in TABLE.items() for value in values]
CONFIG_OF = {name: config for config in CONFIGS for name in declared(config)}


def shown(value):
    """The beginning of `repr`, which Python refuses for numbers of more than 4,300 digits."""
    return "huge" if type(value) is int and value >= 10**4000 else repr(value)[:30]


def test_the_table_has_every_option():
    assert TABLE.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name, value", BAD, ids=shown)
def test_values_out_of_range(tiny, name, value):
    """S01, S04, S06, S09, S12: refused by name, by the config and by `stream`, before anything is computed."""
    others, _, allowed, _ = TABLE[name]
    with pytest.raises(OptionError) as of_config:
        CONFIG_OF[name](**{name: value})
    others = {key: tiny if key == "draft_model" else other for key, other in others.items()}
    with pytest.raises(OptionError) as of_stream:
        minigen.stream(*tiny, "a", **others, **{name: value})
    for error in (of_config, of_stream):
        message = str(error.value)
        assert "\n" not in message and len(message) < 400
        if name == "stop":  # names the text that is wrong, not the list
            assert message.startswith("stop is ") and allowed in message
        elif type(value) is int and value > 10**40:
            assert message.startswith(f"{name} is ") and message.endswith("; it must be at most 10**40")
        else:
            value = value.item() if isinstance(value, np.floating) else value
            assert message.startswith(f"{name} is {value!r}; it must be {allowed}")


def as_typed(value):
    return "9" * 5000 if shown(value) == "huge" else value if isinstance(value, str) else repr(value).lower()


@pytest.mark.parametrize(
    "name, value",
    [
        (name, value)
        for name, value in BAD
        if OPTIONS[name].group
        and OPTIONS[name].kind.parse
        and type(value) in (int, float, str)
        and name not in ("stop", "logit_bias")
    ]
    + [("stop", ""), *((name, "2.5") for name in ("top_k", "seed", "num_beams", "num_draft_tokens"))],
    ids=shown,
)
def test_values_out_of_range_on_the_command_line(cli, name, value):
    """The same sentences about the same option by its flag, before a model is loaded."""
    others, _, allowed, _ = TABLE[name]
    flag = f"--{name.replace('_', '-')}"
    more = [f"--{key.replace('_', '-')}" + ("" if other is True else f"={other}") for key, other in others.items()]
    more = ["--draft-model=other" if option == "--draft-model" else option for option in more]
    if name == "early_stopping" and value == 1:
        value = "1"
    code, out, err = cli("--model", "/nonexistent", "a", *more, f"{flag}={as_typed(value)}")
    assert (code, out) == (2, "") and err.startswith(f"minigen: {flag} is ") and len(err.splitlines()) == 1
    if not (isinstance(value, int) and value > 10**40):
        assert allowed in err and f"{as_typed(value)}" in err.replace("'", "")


@pytest.mark.parametrize("name, value", GOOD, ids=shown)
def test_values_in_range(tiny, name, value):
    kept = getattr(CONFIG_OF[name](**{name: value}), name)
    assert kept == (tuple(value) if isinstance(value, list) else (value,) if name == "stop" and value == "a" else value)
    others = {key: tiny if key == "draft_model" else other for key, other in TABLE[name][0].items()}
    if name != "num_return_sequences" or value == 1:
        minigen.stream(*tiny, "a", **others, **{name: value})


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64, np.uint64, np.float16, np.float32, np.longdouble])
def test_numpy_scalars_become_python_numbers(kind):
    """F20: a scalar of any width is the number that it holds, and does not overflow later on."""
    for name in OPTIONS:
        value = TABLE[name][3][0] if not TABLE[name][3] else next((v for v in TABLE[name][3] if type(v) is int), None)
        is_real = isinstance(OPTIONS[name].default, float)
        if value is None or not 0 <= value < 100 or (not is_real and not issubclass(kind, np.integer)):
            continue
        kept = getattr(CONFIG_OF[name](**{name: kind(value)}), name)
        assert kept == value and type(kept) is (int if issubclass(kind, np.integer) else float), name
    bias = minigen.SamplingConfig(logit_bias={np.uint8(3): np.float32(1.5)}).logit_bias
    assert bias == {3: 1.5} and type(next(iter(bias))) is int and type(bias[3]) is float
    assert type(minigen.DecodingConfig(stop=[np.str_("a")]).stop[0]) is str


@pytest.mark.filterwarnings("error")
def test_a_float16_bias_is_not_compared_as_one():
    """F20: the largest bias allowed is no float16."""
    assert minigen.SamplingConfig(logit_bias={3: np.float16(1.5)}).logit_bias == {3: 1.5}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", [np.array([]), np.array([1, 2]), np.array(1.0), np.array(["a", "b"])], ids=repr)
def test_arrays_are_refused_by_name(name, value):
    """F20: a comparison with an array is an array, which has no truth value."""
    with pytest.raises(OptionError, match=rf"^{name} is {re.escape(repr(value))}; it must be "):
        CONFIG_OF[name](**{name: value})


def test_the_callers_bias_is_copied():
    """F19: the caller's dictionary is not shared."""
    given = {3: 1.0}
    kept = minigen.SamplingConfig(logit_bias=given).logit_bias
    given[4] = 2.0
    assert kept == {3: 1.0}


@pytest.mark.parametrize("bias", [math.nan, math.inf, "1", None, True, 1.1e30, -1.1e30], ids=repr)
def test_a_bias_out_of_range_names_its_token(tiny, bias):
    for token in (97, "a"):
        with pytest.raises(OptionError) as error:
            minigen.stream(*tiny, "a", logit_bias={4: 1, token: bias})
        assert str(error.value).startswith(f"logit_bias of token {token!r} is {bias!r}; it must be a number from -1e30")


def test_a_bias_that_names_no_token(tiny):
    """F18: a long text is shortened."""
    for token, words in (
        (257, "257.* 0 to 256"),
        (-1, "-1.* 0 to 256"),
        ("two", "'two', which is 3 tokens"),
        ("x" * 10**5, "x{9} .*which is 100000 tokens"),
    ):
        with pytest.raises(OptionError, match=f"^logit_bias names (token )?{words}|\\.\\.\\.") as error:
            minigen.stream(*tiny, "a", logit_bias={token: 1.0})
        assert len(str(error.value)) < 400


# ---- options that do not go together -----------------------------------------------------------------------------

# (arguments of `stream`, command line, the option refused, words of the reason)
CONFLICTS = [
    *(
        ({"num_beams": 2, name: value}, ["--num-beams=2", f"--{name.replace('_', '-')}={value}"], name, "beam search")
        for name, value in (("temperature", 0), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.1), ("typical_p", 0.9))
    ),
    ({"num_beams": 2, "context_shift": True}, ["--num-beams=2", "--context-shift"], "context_shift", "beam search"),
    ({"length_penalty": 1.0}, ["--length-penalty=1"], "length_penalty", "num.beams"),
    ({"early_stopping": True}, ["--early-stopping=true"], "early_stopping", "num.beams"),
    (
        {"num_beams": 2, "num_return_sequences": 3},
        ["--num-beams=2", "--num-return-sequences=3"],
        "num_return_sequences",
        "at most (--)?num.beams, 2",
    ),
    (
        {"num_beams": 2, "prompt_lookup_num_tokens": 3},
        ["--num-beams=2", "--prompt-lookup-num-tokens=3"],
        "num_beams",
        "speculative decoding",
    ),
    ({"num_beams": 2, "draft_model": 1}, ["--num-beams=2", "--draft-model=x"], "num_beams", "speculative decoding"),
    (
        {"prompt_lookup_num_tokens": 2, "draft_model": 1},
        ["--prompt-lookup-num-tokens=2", "--draft-model=x"],
        "prompt_lookup_num_tokens",
        "draft model",
    ),
    ({"num_draft_tokens": 4}, ["--num-draft-tokens=4"], "num_draft_tokens", "draft model"),
    ({"draft_vocab_size": 4}, ["--draft-vocab-size=4"], "draft_vocab_size", "draft model"),
    ({"max_matching_ngram_size": 2}, ["--max-matching-ngram-size=2"], "max_matching_ngram_size", "prompt.lookup.num"),
    (
        {"num_return_sequences": 2, "draft_model": 1},
        ["--num-return-sequences=2", "--draft-model=x"],
        "num_return_sequences",
        "speculative decoding",
    ),
    ({"use_cache": False, "draft_model": 1}, ["--no-cache", "--draft-model=x"], "use_cache", "speculative decoding"),
    ({"use_cache": False, "cache": "x"}, ["--no-cache", "--prompt-cache=x"], "use_cache", "prompt cache"),
    ({"window": 4, "cache": "x"}, ["--window=4", "--prompt-cache=x"], "window", "prompt cache"),
    ({"keep": 3}, ["--keep=3"], "keep", "context.shift"),
]


@pytest.mark.parametrize("options, typed, name, reason", CONFLICTS, ids=lambda value: str(value)[:60])
def test_options_that_do_not_go_together(tiny, cli, options, typed, name, reason):
    given = {key: tiny if key == "draft_model" else value for key, value in options.items()}
    with pytest.raises(OptionError, match=rf"^{name} is {re.escape(repr(options[name]))}(;|, but) .*{reason}"):
        minigen.stream(*tiny, "a", **given)
    code, out, err = cli("--model", "/nonexistent", "a", *typed)
    flag = "--no-cache" if name == "use_cache" else f"--{name.replace('_', '-')}"
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert re.match(rf"minigen: {flag} is .*(;|, but) .*{reason}", err), err
    assert not re.search(r"\b(?<!--)[a-z]+_[a-z]|None|True|False", err)


def test_neutral_values_conflict_with_nothing(tiny):
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0, "typical_p": 1, "context_shift": False, "keep": 0, "window": None}
    minigen.stream(*tiny, "a", num_beams=2, use_cache=True, prompt_lookup_num_tokens=0, cache="x", **neutral)
    minigen.stream(*tiny, "a", num_beams=1, draft_model=tiny, num_return_sequences=1, prompt_lookup_num_tokens=0)


def test_unknown_names():
    for name in ("temprature", "eos_ids", "max_new_tokens"):
        with pytest.raises(TypeError, match=f"there is no option '{name}'; the options are context_shift, "):
            check_options({name: 1})


# ---- where options are shown -------------------------------------------------------------------------------------


def test_help_of_generate_shows_every_option():
    for function in (minigen.generate, minigen.stream, minigen.Session.__init__):
        parameters = inspect.signature(function).parameters
        for name, option in OPTIONS.items():
            assert (
                parameters[name].default == option.default and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            )
            line = next(line for line in inspect.getdoc(function).splitlines() if line.startswith(f"    {name}: "))
            assert option.kind.allowed in line and f"default {option.default!r}" in line and option.help in line
        assert "options" not in parameters


def test_the_static_types_are_those_of_the_table():
    """`GenerateOptions` is what editors see; it is wider for the options that `check_options` converts."""
    static = typing.get_type_hints(GenerateOptions)
    table = {name: kind for config in CONFIGS for name, kind in typing.get_type_hints(config).items()}
    assert list(static) == list(OPTIONS)
    table |= {"logit_bias": Mapping[int | str, float], "stop": typing.Union[str, Sequence[str], None]}  # noqa: UP007
    assert {name: static[name] for name in OPTIONS} == {name: table[name] for name in OPTIONS}


def test_the_command_has_every_option_of_generate():
    for name, option in OPTIONS.items():
        assert (name in arguments.ALL) == (name != "logits_processors"), name
        if name in arguments.ALL:
            assert option.group in arguments.GROUPS and option.help
    assert arguments.FLAGS["use_cache"] == "--no-cache"


def test_values_typed_are_the_values_of_the_api(tiny_folder, tiny, cli):
    """Every flag that takes a value, against `generate` with the same value."""
    options = dict(max_tokens=30, min_tokens=3, temperature=0.9, top_k=20, top_p=0.8, min_p=0.01, typical_p=0.9, seed=5)
    options |= dict(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, no_repeat_ngram_size=3)
    options |= dict(num_return_sequences=2, logprobs=1, window=9, stop=["zz", "é"], logit_bias={70: 0.5, "a": -1.5})
    args = ["--json", "-q", "--model", tiny_folder, "ab"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "logit_bias":
            args += [flag, "70+0.5", flag, "a=-1.5"]
        else:
            args += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    code, out, _ = cli(*args)
    expected = minigen.generate(*tiny, "ab", **options)
    assert code == 0
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [done.token_ids for done in expected]


def test_the_value_of_an_option_may_be_two_dashes(tiny_folder, cli):
    """F18: --stop=-- on Python 3.10 to 3.12."""
    args = ["--model", tiny_folder, "x", "-n", "3", "-q", "--logit-bias", "12+90"]  # id 12 is "-"
    assert cli(*args)[1] == "x---\n"
    assert cli(*args, "--stop=--")[:2] == (0, "x\n")


@pytest.mark.parametrize(
    "value, kind, source",
    [
        ("gpt2", "a str", "'gpt2'"),
        (Path("a b"), f"a {type(Path()).__name__}", "'a b'"),
        (None, "a NoneType", ""),
        (3, "an int", ""),
        (minigen.GPT2, "a type", ""),
    ],
    ids=repr,
)
def test_what_is_not_a_model_or_a_tokenizer_is_to_be_loaded_first(tiny, value, kind, source):
    told = f"{value!r}, {kind}; load it first: model, tokenizer = minigen.load({source})"
    model, tokenizer = tiny
    for function in (minigen.generate, minigen.stream, minigen.trace, minigen.Session):
        prompts = [] if function is minigen.Session else ["a"]
        for name, pair in (("model", (value, tokenizer)), ("tokenizer", (model, value))):
            with pytest.raises(TypeError) as raised:
                function(*pair, *prompts)
            assert str(raised.value) == f"{name} is {told}"
    with pytest.raises(TypeError) as raised:
        minigen.score(value, [1, 2, 3])
    assert str(raised.value) == f"model is {told}"
