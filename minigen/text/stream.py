"""Incremental UTF-8 decoding and stop-string matching across token boundaries."""

import codecs


class IncrementalUtf8Decoder:
    """Bytes in, text out, in pieces: a character is given out as soon as its last byte is in, and not before.

    All pieces together are what decoding all bytes at once gives, with U+FFFD for what is not UTF-8.
    """

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data):
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def flush(self):
        """What is left of an unfinished character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in streamed text, and holds back only what may still become one.

    The stop that is complete first wins; of several complete at the same character, the longest. So the outcome does
    not depend on how the text is cut into pieces. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops):
        if "" in stops:
            raise ValueError("a stop string is empty; it would match everywhere: leave it out")
        self.stops = stops
        self.matched = None
        self._held = ""

    @staticmethod
    def _overlap(text, stop):
        """Length of the longest end of `text` that is a beginning of `stop`."""
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
