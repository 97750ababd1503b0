"""Ten thousand random and nasty strings for the tokenizer tests, the same on every machine.

The golden ids were made from these strings, so the generator must never drift. Two rules keep it fixed:

- the only source of chance is `random.Random(seed).random()`, the one method whose sequence Python promises to keep;
- every code point belongs to a range whose characters were assigned long ago (or can never be assigned), because a
  newly assigned character moves from "neither letter nor number" to another class, and its ids move with it.

The golden file also stores `digest(strings())`, so a drift is reported as what it is and not as 10,000 wrong ids.
There are no lone surrogates here: they have no UTF-8 form, and are tested apart.
"""

import hashlib
import random

COUNT = 10_000
SEED = 20_190_214
END_OF_TEXT = "<|endoftext|>"

# The 25 characters of Unicode's White_Space property, which is what `\s` means to the GPT-2 pattern ...
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
# ... and those that look like spaces or that Python's str.isspace() takes for one, but which are not in it.
NOT_SPACE = "\x1c\x1d\x1e\x1f\u180e\u200b\u200c\u200d\u2060\ufeff\u2800\u3164\x08\x00\x7f"

CONTRACTIONS = "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D 'Re 'lL 'st 'dd 'x 'l 'v 'r ’s ’ll ' ''s".split()

WORDS = """
the of and a to in he was it that his her with for had not but as you she at on they be is all said him there one
have were them then so my this when out up would little which no into old king who what went man down from upon we
very could time two good came more again made did now see if over me or how some about go day do great like never
house your than long thought himself only come well where door water people last before am room before hand after
forest children away mother golden castle wolf princess strawberry tensorflow antidisestablishmentarianism Zürich
GPT-2 naïve café I I'm I'll don't can't won't they're you've he'd she's isn't rock'n'roll o'clock O'Brien's e.g.
""".split()

CODE = [
    "def f(x, *args, **kw):\n    return x[::-1]\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\n}\r\n",
    "import tensorflow as tf",
    "if x != y && !z || w == NULL:",
    'print(f"{name!r:>{width}}")',
    '<div class="a-b">&nbsp;</div>',
    "SELECT * FROM t WHERE id='7' -- drop",
    "\\begin{align}x^2 &= \\frac{1}{2}\\\\\\end{align}",
    "#!/bin/sh\n#\n## set -e ###\n",
    '{"a": [1, 2.5e-10, null], "b\\u00e9": "\\n"}',
    "a->b::c<T&&>(*p)->*q;",
    "x = y ** 2 // 3 % 4 @ m << 1 >> 2",
    "@@ -1,7 +1,9 @@",
    "/* ---- */ // ==== ////",
    "$HOME/.cache/${x:-y} | grep -E '^[a-z]+$' > /dev/null 2>&1",
    "\t\tif\t(a)\t{\t}\n\n\n",
    "λx.x →∀y∃z ≤ ∞",
]

URLS = [
    "https://example.org/a/b?c=d&e=%20f#g",
    "http://127.0.0.1:8080/index.html",
    "mailto:a.b+c@example.co.uk",
    "www.example.com/~u/",
    "file:///C:/Users/x/My%20Documents",
    "https://de.wikipedia.org/wiki/Straße_(Begriffsklärung)",
    "ssh://git@host:22/x.git",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg==",
    "xn--mnchen-3ya.de",
    "C:\\Windows\\System32\\drivers\\etc\\hosts",
]

EMOJI = """
😀 😃 👍 👍🏽 👩🏿‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🏴‍☠️ ❤️ ❤️‍🔥 ☺ ☺️
☺︎ 🇩🇪 🇯🇵🇧🇷 1️⃣ #️⃣ 🦄 🧙‍♂️ ✍🏻 🤝 ©️ ™ ㊙️
""".split()

# Letters, numbers and marks by script: (first, last) inside blocks where every code point of the range is assigned.
SCRIPTS = {
    "latin-1": [(0xA1, 0xFF)],
    "latin extended": [(0x100, 0x17F), (0x180, 0x21F), (0x1E00, 0x1E99), (0xFF21, 0xFF3A), (0xFB00, 0xFB06)],
    "ipa and modifiers": [(0x250, 0x2AD), (0x2B0, 0x2EE)],
    "combining": [(0x300, 0x34E), (0x20D0, 0x20E3), (0x483, 0x486), (0x1AB0, 0x1ABE), (0xFE20, 0xFE23)],
    "greek": [(0x391, 0x3A1), (0x3A3, 0x3CE), (0x1F00, 0x1F15), (0x1F80, 0x1FB4)],
    "cyrillic": [(0x400, 0x45F), (0x48C, 0x4C4)],
    "armenian, georgian": [(0x531, 0x556), (0x561, 0x587), (0x10D0, 0x10F6)],
    "hebrew": [(0x5D0, 0x5EA), (0x5B0, 0x5B9), (0x5F0, 0x5F4)],
    "arabic": [(0x621, 0x63A), (0x640, 0x655), (0x660, 0x66D), (0x671, 0x6D3), (0xFB50, 0xFBB1)],
    "bidi controls": [(0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069)],
    "devanagari": [(0x905, 0x939), (0x93E, 0x94D), (0x966, 0x970), (0x200C, 0x200D)],
    "bengali, tamil, thai": [(0x993, 0x9A8), (0xBAE, 0xBB5), (0xBE7, 0xBF2), (0xE01, 0xE3A), (0xE40, 0xE5B)],
    "tibetan, ethiopic, khmer": [(0xF20, 0xF33), (0xF40, 0xF47), (0x1208, 0x1246), (0x1369, 0x137C), (0x1780, 0x17DC)],
    "kana": [(0x3041, 0x3094), (0x30A1, 0x30FE), (0xFF66, 0xFF9D)],
    "cjk": [(0x4E00, 0x9FA5)],
    "cjk extensions": [(0x3400, 0x4DB5), (0x20000, 0x2A6D6), (0x2F800, 0x2FA1D)],
    "hangul": [(0xAC00, 0xD7A3), (0x1100, 0x1112), (0x1161, 0x1175), (0x11A8, 0x11C2)],
    "cjk punctuation": [(0x3001, 0x301F), (0xFF01, 0xFF0F), (0xFF1A, 0xFF20)],
    "numbers, BMP": [(0xB2, 0xB3), (0xB9, 0xB9), (0xBC, 0xBE), (0x2070, 0x2070), (0x2074, 0x2079), (0x2080, 0x2089)],
    "number forms": [(0x2153, 0x2183), (0x2460, 0x249B), (0x24EA, 0x24EA), (0x2776, 0x2793), (0x3007, 0x3007)],
    "ideographic numbers": [(0x3021, 0x3029), (0x3038, 0x303A), (0x3220, 0x3229), (0x3280, 0x3289), (0xFF10, 0xFF19)],
    "numbers, astral": [(0x10107, 0x10133), (0x10320, 0x10323), (0x1034A, 0x1034A), (0x12400, 0x12462)],
    "digits, astral": [(0x1D7CE, 0x1D7FF), (0x1D360, 0x1D371), (0x1F100, 0x1F10A), (0x10E60, 0x10E7E)],
    "letters, astral": [(0x10300, 0x1031E), (0x10400, 0x1044D), (0x12000, 0x12398), (0x1D400, 0x1D454)],
    "punctuation": [(0x2010, 0x2027), (0x2030, 0x2046), (0x20A0, 0x20B1)],
    "symbols": [(0x2190, 0x21FF), (0x2200, 0x22F1), (0x2500, 0x2595), (0x2600, 0x2613), (0x2801, 0x28FF)],
    "symbols, astral": [(0x1D100, 0x1D126), (0x1F300, 0x1F320), (0x1F600, 0x1F640), (0x1F3FB, 0x1F3FF)],
    "private and never assigned": [(0xE000, 0xF8FF), (0xFDD0, 0xFDEF), (0xFFFE, 0xFFFF), (0x10FFFE, 0x10FFFF)],
    "specials": [(0xFFF9, 0xFFFD), (0xFE00, 0xFE0F), (0xE0020, 0xE007F), (0xFEFF, 0xFEFF)],
    "control": [(0x00, 0x1F), (0x7F, 0x9F)],
    "ascii": [(0x20, 0x7E)],
}
RANGES = list(SCRIPTS.values())

UNITS = [*"aA0-=*.é中😀 \n\t\x00\ufeff", "ab", "the", " the", "00 ", "'s", "e\u0301"]
NEAR_END = [*"aB1<|> \n😀", "", "", "  ", "<|", "|>", "<|endoftext", "<|endoftext|", "endoftext|>", "<|EndOfText|>"]


class Chance:
    """A few draws on top of `Random.random()`, so that no other method of `random` can change the strings."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, items):
        return items[self.below(len(items))]

    def often(self, share: float) -> bool:
        return self._random() < share


def _character(c: Chance, ranges) -> str:
    low, high = c.pick(ranges)
    return chr(c.between(low, high))


def _script(c: Chance) -> str:
    """Words of one script, joined by a space or by nothing."""
    ranges = c.pick(RANGES)
    return c.pick(["", " ", " ", "  "]).join(
        "".join(_character(c, ranges) for _ in range(c.between(1, 6))) for _ in range(c.between(1, 3))
    )


def _mixed_scripts(c: Chance) -> str:
    return "".join(_character(c, c.pick(RANGES)) for _ in range(c.between(1, 12)))


def _prose(c: Chance) -> str:
    words = []
    for _ in range(c.between(2, 14)):
        word = c.pick(WORDS)
        style = c.below(12)
        word = word.upper() if style == 0 else word.capitalize() if style == 1 else word
        words.append(word + c.pick([""] * 8 + [",", ".", "!", "?", ";", "...", " --", "'", '"', ")"]))
    return c.pick(["", "", "", " ", "\n", '"', "("]) + " ".join(words) + c.pick(["", "", "", " ", "\n", "  "])


def _code(c: Chance) -> str:
    return c.pick(CODE)


def _url(c: Chance) -> str:
    return c.pick(URLS)


def _contractions(c: Chance) -> str:
    return "".join(
        c.pick(["", " ", "a", "we", "WE", "1", "é", "中", "\n", "!", "'"]) + c.pick(CONTRACTIONS)
        for _ in range(c.between(1, 5))
    )


def _digits_and_letters(c: Chance) -> str:
    alphabet = c.pick(["0123456789", "0123456789abcdef", "01 ,.-", "0123456789xyzXYZ_", "1a²½Ⅷé٣४"])
    return "".join(c.pick(alphabet) for _ in range(c.between(1, 20)))


def _white_space(c: Chance) -> str:
    """Runs of one or of several kinds of white space, with and without something after them."""
    out = []
    for _ in range(c.between(1, 4)):
        kinds = c.pick([" ", "\n", "\t", "\r\n", " \n", WHITE_SPACE, WHITE_SPACE + NOT_SPACE, c.pick(WHITE_SPACE)])
        if kinds == "\r\n":
            out.append(kinds * c.between(1, 4))
        else:
            out.append("".join(c.pick(kinds) for _ in range(c.between(1, 7))))
        out.append(c.pick(["", "a", "word", "7", "!", "'s", "é", "中", "😀", c.pick(NOT_SPACE), END_OF_TEXT]))
    return "".join(out)


def _emoji(c: Chance) -> str:
    return c.pick(["", "", " "]).join(c.pick(EMOJI) for _ in range(c.between(1, 5)))


def _combining(c: Chance) -> str:
    marks = SCRIPTS["combining"]
    return "".join(
        c.pick("aeonuzAEO 1!é一ا") + "".join(_character(c, marks) for _ in range(c.between(0, 4)))
        for _ in range(c.between(1, 6))
    )


def _repeats(c: Chance) -> str:
    unit = c.pick(UNITS)
    return c.pick(["", "", "x", " "]) + unit * c.between(2, 40) + c.pick(["", "", "x", " ", "\n"])


def _hashes(c: Chance) -> str:
    return "".join(
        "#" * c.between(1, 34) + c.pick(["", " ", "$", "$#", "\n", " a", "!"]) for _ in range(c.between(1, 3))
    )


def _end_of_text(c: Chance) -> str:
    return "".join(c.pick(NEAR_END) + END_OF_TEXT * c.between(0, 2) + c.pick(NEAR_END) for _ in range(c.between(1, 3)))


def _utf8_borders(c: Chance) -> str:
    """Characters next to where the UTF-8 form grows by a byte, and around the surrogates."""
    points = [0, 0x7E, 0x7F, 0x80, 0x7FE, 0x7FF, 0x800, 0xD7A3, 0xE000, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF]
    return "".join(chr(c.pick(points)) for _ in range(c.between(1, 8)))


KINDS = [_script, _script, _script, _mixed_scripts, _prose, _prose, _code, _url, _contractions, _digits_and_letters]
KINDS += [_white_space, _white_space, _emoji, _combining, _repeats, _hashes, _end_of_text, _utf8_borders]


def strings(count: int = COUNT, seed: int = SEED) -> list[str]:
    """The first `count` strings: the empty one, every character below 256, then random ones; all different.

    >>> strings(3)
    ['', '\\x00', '\\x01']
    """
    c = Chance(seed)
    out = dict.fromkeys([""] + [chr(value) for value in range(256)])  # a dict, so that no string comes twice
    while len(out) < count:
        pieces = [c.pick(KINDS)(c) for _ in range(1 if c.often(0.75) else c.between(2, 3))]
        out[c.pick(["", "", " ", "\n", "\u3000"]).join(pieces)] = None
    return list(out)[:count]


def long_strings() -> dict[str, str]:
    """Very long ones, which show limits of the regular expression behind the pre-tokenizer and slow merging."""
    out = {}
    for length in (5_000, 100_000, 1_000_000):
        out[f"letter {length}"] = "a" * length
        out[f"spaces {length}"] = " " * length
        out[f"spaces and a letter {length}"] = "b" + " " * length + "a"
        out[f"mixed {length}"] = "it's 12! \u00e9\u4e2d \n" * (length // 13)
    for length in (5_000, 100_000):
        out[f"digits {length}"] = "0123456789" * (length // 10)
        out[f"signs {length}"] = "=" * length
        out[f"newlines {length}"] = "\n" * length + "!"
        out[f"mixed white space {length}"] = " \n\t\u3000\u00a0 \r\n\n" * (length // 9) + "x"
    return out


def digest(texts: list[str]) -> str:
    """SHA-256 over the strings, each preceded by its length in bytes."""
    total = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()
