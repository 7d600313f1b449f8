"""Input logprobs are computed at prefill; the answer comes from decode. Here the one is put into the other."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sglang_pd.router import sse
from sglang_pd.router.failures import Failure, RequestFailed

KEYS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


class InputLogprobs:
    """What prefill's answer says of each sequence of a request. Fed with the whole answer, of either form."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._of: dict[int, dict[str, list[Any]]] = {}
        self._given: set[int] = set()

    def take(self, body: bytes, *, stream: bool) -> None:
        """Read prefill's answer. Raises `RequestFailed` when it is not one document for each sequence."""
        documents = list(sse.documents(body)) if stream else _documents(body)
        for number, document in enumerate(documents):
            index = document.get("index", 0 if stream else number)
            meta = document.get("meta_info")
            if isinstance(meta, dict) and isinstance(index, int):
                found = {key: meta[key] for key in KEYS if isinstance(meta.get(key), list)}
                known = self._of.setdefault(index, {})
                # A stream may tell them at its beginning, at its end, or in every event.
                known |= {key: values for key, values in found.items() if len(values) >= len(known.get(key, ()))}
        if not stream and len(documents) != self._sequences:
            raise _unfit(f"prefill answered {len(documents)} sequences of {self._sequences}")

    def merge(self, body: bytes) -> bytes:
        """Decode's whole answer with prefill's input logprobs before its own."""
        answer = msgspec.json.decode(body)
        documents = answer if isinstance(answer, list) else [answer]
        if len(documents) != self._sequences or not all(isinstance(document, dict) for document in documents):
            raise _unfit(f"decode answered {len(documents)} sequences of {self._sequences}")
        for index, document in enumerate(documents):
            self._put(document, index)
        return msgspec.json.encode(answer)

    def merge_events(self, data: bytes) -> bytes:
        """The same for whole events of a stream: those that carry input logprobs, else the first of each sequence."""
        out = bytearray()
        for payload in sse.events(data):
            try:
                document = msgspec.json.decode(payload)
            except msgspec.DecodeError:
                document = None
            if not isinstance(document, dict) or not isinstance(document.get("meta_info"), dict):
                out += b"data: " + payload.replace(b"\n", b"\ndata: ") + b"\n\n"
                continue
            index = document.get("index", 0)
            if index not in self._given or any(key in document["meta_info"] for key in KEYS):
                self._given.add(index)
                self._put(document, index)
            out += sse.event(document)
        return bytes(out)

    def _put(self, document: dict[str, Any], index: int) -> None:
        meta = document.setdefault("meta_info", {})
        for key, values in self._of.get(index, {}).items():
            own = meta.get(key)
            meta[key] = [*values, *(own if isinstance(own, list) else [])]


def _documents(body: bytes) -> list[dict[str, Any]]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unfit(f"prefill's answer is not JSON: {error}") from None
    found = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(document, dict) for document in found):
        raise _unfit("prefill's answer is not an object")
    return found


def _unfit(message: str) -> RequestFailed:
    return RequestFailed(
        Failure(code="worker_failed", message=f"input logprobs: {message}", status=502, retryable=False)
    )
