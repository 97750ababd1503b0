"""The drawings of README, as SVG: the way of a token through the package, and the ring of the K/V cache.

    python -m benchmarks.drawings

writes benchmarks/figures/dataflow.svg and ring.svg. What the ring holds, and what a query sees in it, is read off a
KVCache that is really driven.
"""

import math
from pathlib import Path

import numpy as np

from minigen import KVCache

FIGURES = Path(__file__).parent / "figures"
PAPER, INK, PALE, LINE = "#fbfaf7", "#1f2933", "#6b7280", "#4b5563"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


# ---------------------------------------------------------------------------------------- SVG


def number(value):
    """At most one decimal, and no -0."""
    return f"{round(value, 1) + 0:g}"


def label(x, y, text, size=14, fill=INK, weight="normal", anchor="middle"):
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def rectangle(x, y, width, height, fill, stroke=LINE, radius=8, dash=""):
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{stroke}"{dash}/>'
    )


def arrow(*points):
    """A line through the points with a head at the last."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#head)"/>'


def drawing(width, height, title, parts):
    """A whole file: the parts on a light ground, which readers with a dark page need."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="{FONT}" role="img">',
            f"<title>{title}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
            rectangle(1, 1, width - 2, height - 2, PAPER, "#d6d3cb", radius=14),
            *parts,
            "</svg>\n",
        ]
    )


# ---------------------------------------------------------------------------------------- the way of a token

TOKENIZER, DECODERS, MODEL, CACHE, SAMPLER = "#dbeafe", "#fde8c8", "#dcf3e0", "#f6dde8", "#e6defa"
BOXES = (  # (file, functions, what it does, x, y, width, height, colour)
    ("tokenizer.py", ("Tokenizer.encode",), "", 40, 108, 230, 54, TOKENIZER),
    ("decode.py", ("decode", "feed"), "feeds context[cache.length:]", 48, 250, 214, 72, DECODERS),
    ("beam.py", ("beam_search",), "", 48, 332, 104, 54, DECODERS),
    ("speculative.py", ("speculate",), "", 158, 332, 104, 54, DECODERS),
    ("decode.py", ("Row.accept",), "appends; does the text end?", 40, 422, 230, 70, DECODERS),
    ("tokenizer.py", ("Utf8Stream", "StopMatcher"), "", 40, 520, 230, 54, TOKENIZER),
    ("ops.py", ("embed",), "[B, T] → [B, T, E]", 376, 92, 258, 72, MODEL),
    ("ops.py", ("layer_norm", "linear"), "→ q, k, v [B, H, D, T]", 376, 206, 258, 72, MODEL),
    ("ops.py", ("attention",), "each token looks at those it may see", 376, 298, 258, 72, MODEL),
    ("ops.py", ("linear", "layer_norm", "gelu_new"), "out of the heads, then the MLP", 376, 390, 258, 72, MODEL),
    ("ops.py", ("layer_norm", "linear"), "[B, E] → [B, V]", 376, 504, 258, 72, MODEL),
    ("cache.py", ("KVCache.extend",), "slots and mask, once a pass", 730, 92, 230, 72, CACHE),
    ("cache.py", ("KVCache.store",), "new keys in, all keys out", 730, 240, 230, 72, CACHE),
    ("sampler.py", ("probs",), "penalties, temperature, filters", 730, 504, 230, 72, SAMPLER),
    ("sampler.py", ("draw",), "one uniform number", 730, 616, 230, 72, SAMPLER),
)


def box(file, functions, note, x, y, width, height, colour):
    """File above, functions below it, and a note where there is one."""
    middle, size = x + width / 2, 13 if width > 110 else 11
    lines = [
        label(middle, y + 20, file, size, PALE),
        label(middle, y + 40, ", ".join(functions), size + 1, weight="600"),
    ]
    return [rectangle(x, y, width, height, colour), *lines, *([label(middle, y + 60, note, 12)] if note else [])]


def dataflow():
    """The way of a token through the package."""
    parts = [
        rectangle(40, 214, 230, 182, "none", PALE, dash="5 4"),
        label(155, 237, "one of three decoders, here the first", 12, PALE),
        rectangle(360, 40, 290, 552, "none", PALE, dash="5 4"),
        label(505, 62, "model.py", 13, PALE),
        label(505, 81, "GPT2.forward", 14, weight="600"),
        rectangle(368, 176, 274, 298, "none", PALE, dash="2 3"),
        label(384, 196, "L blocks", 12, PALE, anchor="start"),
    ]
    for entry in BOXES:
        parts += box(*entry)
    parts += [
        rectangle(40, 40, 230, 36, "#ffffff", radius=18),
        label(155, 63, "Once upon a time"),
        rectangle(40, 624, 230, 36, "#ffffff", radius=18),
        label(155, 647, ", there was a little"),
        arrow((155, 76), (155, 107)),
        arrow((155, 162), (155, 213)),
        label(164, 190, "ids", 13, anchor="start"),
        arrow((155, 422), (155, 397)),
        label(164, 414, "one more id", 13, anchor="start"),
        arrow((155, 492), (155, 519)),
        label(164, 511, "bytes", 13, anchor="start"),
        arrow((155, 574), (155, 623)),
        label(164, 603, "text", 13, anchor="start"),
        # Into the model: what the cache lacks.
        arrow((270, 286), (315, 286), (315, 128), (375, 128)),
        label(314, 120, "new ids", 13),
        # Down the model.
        arrow((505, 164), (505, 205)),
        arrow((505, 278), (505, 297)),
        arrow((505, 370), (505, 389)),
        arrow((505, 462), (505, 503)),
        # The cache.
        arrow((650, 128), (729, 128)),
        label(690, 118, "positions", 13),
        arrow((634, 242), (682, 242), (682, 264), (729, 264)),
        label(690, 236, "k, v", 13, anchor="start"),
        arrow((730, 292), (682, 292), (682, 334), (635, 334)),
        label(692, 344, "keys, values [B, H, D, S]", 13, anchor="start"),
        label(692, 364, "and the plan's mask [B, 1, T, S]", 13, anchor="start"),
        arrow((845, 164), (845, 239)),
        label(854, 206, "plan", 13, anchor="start"),
        # To the sampler and back.
        arrow((634, 540), (729, 540)),
        label(690, 530, "logits", 13),
        label(690, 558, "a row, [V]", 12, PALE),
        arrow((845, 576), (845, 615)),
        label(854, 601, "p [V]", 13, anchor="start"),
        arrow((730, 652), (315, 652), (315, 458), (271, 458)),
        label(505, 644, "the next id", 13),
    ]
    return drawing(1000, 710, "The way of a token through minigen, by file and function", parts)


# ---------------------------------------------------------------------------------------- the ring

CAPACITY, WINDOW = 12, 8
SEEN, OWN, KEPT, EMPTY = "#9ec5f8", "#1d4ed8", "#e5e3dc", "#ffffff"
FORGOTTEN = "#b91c1c"


def driven_cache():
    """Yields (what happened, slot_pos [C], seen bool [C], the last query's position) of a KVCache, state by state."""
    cache = KVCache(1, 1, 1, CAPACITY, window=WINDOW)

    def feed(*positions):
        plan = cache.extend(np.array([positions]))
        seen = np.zeros(CAPACITY, bool)
        seen[: plan.used] = True if plan.mask is None else plan.mask[0, 0, -1]  # bool [B, 1, T, S] -> [S]
        return cache.slot_pos[0].copy(), seen, positions[-1]

    feed(*range(10))
    for position in range(10, 13):
        feed(position)
    yield ("Token 13 is fed: slot 13 % 12 = 1.", "Slots 0 and 1 held positions 0 and 1."), *feed(13)
    yield ("A draft of three: 14, 15, 16.", "Positions 2, 3 and 4 are overwritten."), *feed(14, 15, 16)
    cache.truncate(15)
    yield ("15 and 16 are rejected: truncate(15).", "Another token 15 is fed, into slot 3."), *feed(15)


def sector(x, y, slot, inner, outer):
    """The path of one slot, clockwise from the top."""
    corners = []
    for radius, turn in ((outer, 0), (outer, 1), (inner, 1), (inner, 0)):
        angle = 2 * math.pi * (slot + turn) / CAPACITY
        corners.append(f"{number(x + radius * math.sin(angle))},{number(y - radius * math.cos(angle))}")
    a, b, c, d = corners
    return f"M{a} A{outer},{outer} 0 0 1 {b} L{c} A{inner},{inner} 0 0 0 {d} z"


def one_ring(x, y, captions, slot_pos, seen, query):
    """The slots in a circle: outside the slot's number, inside the position it holds."""
    parts = []
    for slot, position in enumerate(slot_pos):
        angle = 2 * math.pi * (slot + 0.5) / CAPACITY
        fill = EMPTY if position < 0 else OWN if position == query else SEEN if seen[slot] else KEPT
        ink = FORGOTTEN if position < 0 else "#ffffff" if position == query else INK if seen[slot] else PALE
        dash = ' stroke-dasharray="3 3"' if position < 0 else ""
        parts.append(f'<path d="{sector(x, y, slot, 60, 112)}" fill="{fill}" stroke="{LINE}"{dash}/>')
        sin, cos = math.sin(angle), math.cos(angle)
        parts.append(label(x + 86 * sin, y - 86 * cos + 5, str(position), 16, ink, "600"))
        parts.append(label(x + 126 * sin, y - 126 * cos + 4, str(slot), 12, PALE))
    visible = sorted(int(position) for position in slot_pos[seen])
    parts += [
        label(x, y - 10, f"query at {query}", 14, weight="600"),
        label(x, y + 10, "sees", 13),
        label(x, y + 30, f"{visible[0]} to {visible[-1]}", 14, weight="600"),
        *(label(x, y + 164 + 20 * i, caption, 14) for i, caption in enumerate(captions)),
    ]
    return parts


def ring():
    """Three states of the ring of slots."""
    title = f"The ring: capacity C = {CAPACITY} slots, window W = {WINDOW}; position p lives in slot p % C"
    rule = "visible = (slot_pos >= 0) & (slot_pos <= query_pos) & (slot_pos > query_pos - W)"
    bound = f"at most C - W + 1 = {CAPACITY - WINDOW + 1} tokens."
    bound = f"The slack is C - W = {CAPACITY - WINDOW}. Once the ring is full, a chunk and a rollback are each {bound}"
    parts = [
        label(30, 40, title, 17, weight="600", anchor="start"),
        label(30, 66, rule, 15, anchor="start"),
        label(30, 496, bound, 14, anchor="start"),
    ]
    for index, (captions, *state) in enumerate(driven_cache()):
        parts += one_ring(175 + 325 * index, 230, captions, *state)
    legend = (
        (OWN, "the query's own", ""),
        (SEEN, "what it sees", ""),
        (KEPT, "still there, not seen: the slack, for drafts and chunks", ""),
        (EMPTY, "taken back: slot_pos = -1", "3 3"),
    )
    for (fill, text, dash), x in zip(legend, (31, 190, 326, 742), strict=True):
        parts += [rectangle(x, 444, 18, 18, fill, radius=4, dash=dash), label(x + 26, 458, text, 14, anchor="start")]
    return drawing(1000, 520, "The ring of slots in minigen's K/V cache", parts)


DRAWINGS = {"dataflow.svg": dataflow, "ring.svg": ring}


def main():
    for name, draw in DRAWINGS.items():
        (FIGURES / name).write_text(draw(), encoding="utf-8", newline="\n")
        print(FIGURES / name)


if __name__ == "__main__":
    main()
