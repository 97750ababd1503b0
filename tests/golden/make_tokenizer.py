"""The ids that transformers' GPT-2 tokenizer gives for the nasty strings, stored for tests/test_tokenizer.py.

Run from the project's root, with transformers installed: `python -m tests.golden.make_tokenizer`. It reads local
files only. tokenizer.npz then holds

- `strings_sha256`: which strings the ids belong to (see nasty_strings.digest);
- `gpt2_ids` uint16, `gpt2_lengths` uint16 [10000]: ids of all strings, one after the other, and how many each has;
- `fairytale_ids`, `fairytale_lengths` [2000]: the same with the bundled vocabulary, for every fifth string;
- `long_names`, `long_lengths`, `long_sha256` uint8 [n, 32]: for the very long strings only the number of ids and the
  SHA-256 of the ids as little-endian uint16, with GPT-2's vocabulary.

and tokenizer_folders.npz the ids that the tokenizers library gives to the texts of tokenizer_folders.py in each folder
that is not refused: `digest` of the folders, `ids` and `lengths`, folder by folder and text by text.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from tests.golden import nasty_strings, tokenizer_folders
from tests.golden.tokenizer_folders import digest, library_ids

HERE = Path(__file__).parent
GPT2 = HERE.parent / "data" / "gpt2-bpe"
FAIRYTALE = HERE.parents[1] / "weights" / "fairytale"
EVERY = 5  # the bundled vocabulary is tried on strings[::5]


def _tokenizer(folder: Path):
    from transformers import GPT2TokenizerFast

    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    assert lines[0].startswith("#version") and lines[-1] == ""
    tokenizer = GPT2TokenizerFast(vocab=vocab, merges=[tuple(line.split(" ")) for line in lines[1:-1]])
    assert len(tokenizer) == len(vocab)  # nothing was added, so the arguments were understood
    return tokenizer


def _ids(tokenizer, texts: list[str]) -> list[np.ndarray]:
    encoded = tokenizer(texts)["input_ids"]
    # Every string survives the way back, so that the ids are worth being called golden.
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text, repr(text)
    assert max(max(ids, default=0) for ids in encoded) < 1 << 16
    return [np.array(ids, dtype="<u2") for ids in encoded]


def write_folders(out_folder) -> Path:
    """Write tokenizer_folders.npz into `out_folder` and return its path."""
    ids = [row for folder in tokenizer_folders.folders() if not folder.refused for row in library_ids(folder)]
    path = Path(out_folder) / "tokenizer_folders.npz"
    lengths = np.array([len(row) for row in ids], "<u2")
    np.savez_compressed(path, digest=np.array(digest()), ids=np.concatenate(ids).astype("<u2"), lengths=lengths)
    return path


def main(out_folder) -> Path:
    """Write both files into `out_folder` and return the path of tokenizer.npz."""
    write_folders(out_folder)
    texts = nasty_strings.strings()
    gpt2 = _tokenizer(GPT2)
    long = nasty_strings.long_strings()
    long_ids = [np.array(gpt2(text)["input_ids"], dtype="<u2") for text in long.values()]

    arrays = {"strings_sha256": np.array(nasty_strings.digest(texts))}
    for name, ids in {"gpt2": _ids(gpt2, texts), "fairytale": _ids(_tokenizer(FAIRYTALE), texts[::EVERY])}.items():
        arrays[f"{name}_ids"] = np.concatenate(ids)
        arrays[f"{name}_lengths"] = np.array([len(row) for row in ids], dtype="<u2")
    arrays["long_names"] = np.array(list(long))
    arrays["long_lengths"] = np.array([len(ids) for ids in long_ids], dtype="<u4")
    hashes = [hashlib.sha256(ids.tobytes()).digest() for ids in long_ids]
    arrays["long_sha256"] = np.array([list(value) for value in hashes], dtype=np.uint8)

    path = Path(out_folder) / "tokenizer.npz"
    np.savez_compressed(path, **arrays)
    return path


if __name__ == "__main__":
    written = main(HERE)
    print(f"{written.name}: {written.stat().st_size / 1000:.0f} kB")
