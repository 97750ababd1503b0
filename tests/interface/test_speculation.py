"""Speculation on the command line: what it prints is plain decoding's text, and how the drafts fared."""

import json

import pytest

import minigen

PROMPT = "The king said to his daughter"
GREEDY = ("--temperature", "0", "--max-tokens", "20")


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("--speculative",),
        ("--draft-model", "distilfairytale", "--num-draft-tokens", "2"),
        ("--prompt-lookup-num-tokens", "3", "--max-matching-ngram-size", "1"),
    ],
    ids=" ".join,
)
def test_the_text_is_plain_decodings(cli, fairytale, args):
    (plain,) = minigen.generate(*fairytale, PROMPT, temperature=0, max_tokens=20)
    code, out, err = cli(PROMPT, *GREEDY, *args)
    assert (code, out) == (0, PROMPT + plain.text + "\n")
    header, closing = err.splitlines()
    assert ("drafts by distilfairytale" in header) == ("--prompt-lookup-num-tokens" not in args)
    code, out, _ = cli(PROMPT, *GREEDY, *args, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["text"] == plain.text and record["token_ids"] == plain.token_ids
    stats = record["speculation"]
    assert stats["rule"] == "coupled"
    assert set(stats) == {"rule", "drafted", "accepted", "target_passes", "draft_seconds", "target_seconds"}
    assert stats["target_passes"] + stats["accepted"] - 20 in (0, 1)
    share = stats["accepted"] / stats["drafted"]
    assert f"accepted {stats['accepted']} of {stats['drafted']} drafts ({share:.0%})" in closing
    assert f"{20 / stats['target_passes']:.2f} tokens a pass" in closing
    assert "s drafting" in closing and "s checking" in closing


def test_without_drafts_there_is_nothing_to_report(cli):
    code, out, err = cli(PROMPT, "--max-tokens", "2", "--seed", "1", "--json")
    assert code == 0 and json.loads(out)["speculation"] is None
    assert "drafts" not in err


def test_refusals(cli):
    for args, named in (
        ((PROMPT, PROMPT, "--speculative"), "number of prompts"),
        ((PROMPT, "--speculative", "--model", "distilfairytale"), "distilfairytale"),
    ):
        code, out, err = cli(*args, "--quiet")
        assert code == 2 and out == ""
        assert named in err and err.startswith("minigen: ") and err.count("\n") == 1
