"""Colours generated tokens by probability (ANSI escape sequences).

The less probable a token, the more conspicuous its style, and not by colour alone: unlikely tokens are underlined, very
unlikely ones are also bold.
"""

import math
import os
from itertools import groupby

from minigen.text.stream import IncrementalUtf8Decoder

# (least probability, style as SGR codes, name), most probable first.
LEVELS = (
    (0.5, "", "50 % and more"),
    (0.1, "36", "10 to 50 %"),  # cyan
    (0.01, "4;33", "1 to 10 %"),  # yellow, underlined
    (0.0, "1;4;31", "below 1 %"),  # red, bold, underlined
)
UNLIKELY = 0.1  # below this, tokens are underlined


def has_colours(file):
    """Whether to colour `file`: it is a terminal with colours, and NO_COLOR (no-color.org) is not set."""
    return file is not None and file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _styled(text, style):
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def legend():
    """One line with every style."""
    return "probability: " + " · ".join(_styled(name, style) for _, style, name in LEVELS)


class TokenColorizer:
    """Colours the text of one row's steps.

    Text may come later than its token: an incomplete character waits for its last byte, and a possible stop string is
    held back. So the style of a character is queued when its last byte arrives, and used when the character is printed.
    The probability of a character that is made of several tokens is the product of theirs.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = IncrementalUtf8Decoder()
        self._logprob = 0.0  # of the tokens since the last whole character
        self._styles = []  # of the characters that are not printed yet

    def render(self, step):
        """The step's text with its styles. Every style ends where the text ends, and before a line break."""
        characters = ""
        if step.token is not None:
            self._logprob += step.logprob.logprob
            characters = self._utf8.push(self._tokenizer.token_bytes(step.token))
        if step.finish_reason:
            characters += self._utf8.flush()
        if characters:
            style = next(style for least, style, _ in LEVELS if math.exp(self._logprob) >= least)
            self._styles += ["" if character == "\n" else style for character in characters]
            self._logprob = 0.0
        styles, self._styles = self._styles[: len(step.text)], self._styles[len(step.text) :]
        runs = groupby(zip(step.text, styles, strict=True), key=lambda pair: pair[1])
        return "".join(_styled("".join(character for character, _ in pairs), style) for style, pairs in runs)
