"""Tokens in, text out, in pieces: incremental UTF-8 decoding and stop-string matching across token boundaries."""

import codecs


class TextStream:
    """The text of one row as it may be shown: whole characters only, and nothing that may become a stop string.

    Joined, the pieces are the text before the first stop string; bytes that are not UTF-8 come out as U+FFFD.
    """

    def __init__(self, tokenizer, stops=()):
        self._tokenizer = tokenizer
        self._utf8 = IncrementalUtf8Decoder()
        self._stops = StopMatcher(stops)

    @property
    def stop_sequence(self):
        """The stop string that was found, or None."""
        return self._stops.matched

    def push(self, token):
        """The text that may be shown after one more token."""
        return self._stops.push(self._utf8.push(self._tokenizer.token_bytes(token)))

    def flush(self):
        """The text that was held back, when no token follows."""
        return self._stops.push(self._utf8.flush()) + self._stops.flush()


class IncrementalUtf8Decoder:
    """Bytes in, text out, in pieces: each character appears as soon as its last byte is in.

    Joined, the pieces equal what decoding all bytes at once gives, with U+FFFD for what is not UTF-8.
    """

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data):
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def flush(self):
        """The rest of an unfinished character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in streamed text, and holds back only what may still become one.

    The stop string that is completed first wins; of several completed by one character, the longest wins. So the result
    does not depend on how the text is split into pieces. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops):
        if "" in stops:
            raise ValueError("a stop string is empty; it would match everywhere: leave it out")
        self.stops = stops
        self.matched = None
        self._held = ""

    @staticmethod
    def _overlap(text, stop):
        """Length of the longest suffix of `text` that is a prefix of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)

    def push(self, text):
        """The text that may be shown now; nothing once `matched` is set."""
        if self.matched:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        hold = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self):
        """The text that was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text


def stop_predicate(tokenizer, stops):
    """A function of generated ids: whether their text holds a stop string. None if there are no stop strings."""
    if not stops:
        return None

    def ends_with_stop(ids):
        text = IncrementalUtf8Decoder().push(b"".join(map(tokenizer.token_bytes, ids)))
        return any(stop in text for stop in stops)

    return ends_with_stop
