"""Small damage to bytes, JSON and safetensors files. Every function draws from the `random.Random` it is given."""

import copy
import json
import math

ODD_VALUES = [
    *(None, True, False, "", "a", "gpt2", "gelu", "\ud800", "\0", "../a", "é\n", "9" * 3000),
    *([], [0], [[]], {}, {"a": 1}),
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 255, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 0.0, -0.0, 0.5, 4.0, 1e300),
    *(math.nan, math.inf, -math.inf),
]


def mutate_bytes(data, rng):
    """The bytes with one to three small changes: flipped, cut out, put in, doubled, overwritten, cut off."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 8, 64])
        change = rng.randrange(6)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del data[at : at + length]
        elif change == 2:
            data[at:at] = rng.randbytes(length)
        elif change == 3:
            data[at:at] = data[at : at + length]
        elif change == 4 and at < len(data):
            data[at] = rng.choice(b'0123456789"{}[]:,.-eEnN\\ \0\xff')
        elif change == 5:
            del data[rng.choice([at, 0, max(len(data) - length, 0)]) :]
    return bytes(data)


# ---- JSON ----------------------------------------------------------------------------------------------------------


def _places(value):
    """(container, key) of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def mutate_value(value, rng, odd=ODD_VALUES):
    """A copy of a JSON value in which something has another value, is gone, moved, renamed or added."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or rng.random() < 0.03:
        return copy.deepcopy(rng.choice(odd))
    container, key = rng.choice(places)
    change = rng.randrange(8)
    if change == 0:
        del container[key]
    elif change == 1:
        other, other_key = rng.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    elif change == 2 and isinstance(container, dict):
        container[rng.choice(["", "a", key + "s", key.upper(), "\ud800", "\0", "__proto__"])] = container.pop(key)
    elif change == 3 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] += rng.choice([-1, 1, 0.5, 2**32, -(2**40)])
    elif change == 4 and isinstance(container, list):
        container.insert(key, copy.deepcopy(rng.choice([container[key], *odd])))
    else:
        container[key] = copy.deepcopy(rng.choice(odd))
    return value


def mutate_json(value, rng, odd=ODD_VALUES):
    """The bytes of a JSON file with a changed value, or with a change that only its text can have."""
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        value = mutate_value(value, rng, odd)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    data = text.encode("utf-8", "surrogatepass")
    change = rng.randrange(24)
    if change == 0:
        return b"\xef\xbb\xbf" + data
    if change == 1:
        return text.encode(rng.choice(["utf-16", "utf-32", "cp500"]), "replace")
    if change == 2 and isinstance(value, dict) and len(value) > 1:  # one key twice
        first, second = rng.sample(sorted(value), 2)
        return json.dumps(value).replace(json.dumps(second), json.dumps(first), 1).encode()
    if change == 3:
        depth = rng.choice([100, 900, 100_000])
        return data[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + data[-1:]
    if change == 4:
        return rng.choice([b"", b"\0", b"\xff", b" " * 100, data * 2, data[: len(data) // 2], b"\0" * 100_000])
    return mutate_bytes(data, rng) if change == 5 else data


# ---- safetensors ---------------------------------------------------------------------------------------------------

DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "U16", "U8", "BOOL", "C64", "F31", "f32", ""]
NUMBERS = [-1, 0, 1, 2, 3, 4, 8, 16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, 2**64, 0.5, 1e300, None, "4", []]


def mutate_header(header, rng):
    """A safetensors header with other dtypes, shapes, places, names; with tensors gone, doubled, in another order."""
    header = copy.deepcopy(header)
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    change = rng.randrange(14)
    if change == 0:
        entry["dtype"] = rng.choice([*DTYPES, None, 3, []])
    elif change == 1:
        entry["shape"] = rng.choice([entry["shape"][::-1], [], [0], [1, *entry["shape"]], [math.prod(entry["shape"])]])
    elif change == 2:
        entry["shape"] = [rng.choice([*NUMBERS, size]) for size in entry["shape"]]
    elif change == 3:
        entry["data_offsets"] = [rng.choice([*NUMBERS, offset, offset]) for offset in entry["data_offsets"]]
    elif change == 4:
        shift = rng.choice([-8, -4, -1, 1, 4, 2**40])
        entry["data_offsets"] = [offset + rng.choice([0, shift]) for offset in entry["data_offsets"]]
    elif change == 5:
        entry["data_offsets"] = rng.choice([entry["data_offsets"][::-1], header[other]["data_offsets"], [], [0]])
    elif change == 6:
        header[name], header[other] = header[other], header[name]
    elif change == 7:
        del header[name]
    elif change == 8:
        rename = rng.choice(["transformer." + name, name.removeprefix("transformer."), other, "", "x", "h.9." + name])
        header[rename] = header.pop(name)
    elif change == 9:
        header["__metadata__"] = rng.choice([{}, {"format": 3}, {"a": "b" * 1000}, [], "pt", None, {"a": None}])
    elif change == 10:
        del entry[rng.choice(list(entry))]
    elif change == 11:
        header = dict(rng.sample(list(header.items()), len(header)))
    elif change == 12:
        entry["extra"] = rng.choice(ODD_VALUES)
    else:
        return mutate_value(header, rng)
    return header


def mutate_safetensors(data, rng):
    """A safetensors file with one kind of damage: anywhere, to its length, its header, its tensors or its size."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    change = rng.randrange(10)
    if change == 0:
        return mutate_bytes(data, rng)
    if change == 1:  # the header's length
        lie = rng.choice([0, 1, size - 1, size + 1, size + 8, len(data), 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        return lie.to_bytes(8, "little") + data[8:]
    if change == 2:
        return data + rng.choice([b"\0", rng.randbytes(4), data, b"\0" * 2**20])
    if change == 3:
        return data[: rng.choice([0, 1, 7, 8, 9, 8 + size, rng.randrange(len(data)), len(data) - 4])]
    if change == 4:  # only numbers change: a right file
        body = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return data[: 8 + size] + body
    if change == 5:  # data before the first tensor, of which the header says nothing
        return data[: 8 + size] + rng.randbytes(4) + body
    if change == 6:
        text = mutate_json(header, rng)
    elif change == 7:
        text = mutate_bytes(json.dumps(header).encode(), rng)
    else:
        text = json.dumps(mutate_header(header, rng)).encode() + b" " * rng.randrange(9)
    return len(text).to_bytes(8, "little") + text + body
