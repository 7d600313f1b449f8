"""Input logprobs are computed at prefill; the answer comes from decode. Here the one is put into the other."""

from __future__ import annotations

from typing import Final

import msgspec

from sglang_pd.router import sse
from sglang_pd.router.failures import Failure, RequestFailed

KEYS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


Fields = dict[str, msgspec.Raw]
"""An object whose fields are passed on as they are: lists of thousands of tokens are never decoded."""
_fields = msgspec.json.Decoder(Fields)
_answers = msgspec.json.Decoder(Fields | list[Fields])


class InputLogprobs:
    """What prefill's answer says of each sequence of a request. Fed with the whole answer, of either form."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._of: dict[int, Fields] = {}
        self._given: set[int] = set()

    def take(self, body: bytes, *, stream: bool) -> None:
        """Read prefill's answer. Raises `RequestFailed` when it is not one document for each sequence."""
        documents = [one for one in map(_object, sse.events(body)) if one is not None] if stream else _documents(body)
        for number, document in enumerate(documents):
            index = _index(document, 0 if stream else number)
            meta = _object(document.get("meta_info", b""))
            if meta is not None and index is not None:
                found = {key: meta[key] for key in KEYS if key in meta and _is_list(meta[key])}
                known = self._of.setdefault(index, {})
                # A stream may tell them at its beginning, at its end, or in every event.
                known |= {key: values for key, values in found.items() if len(values) >= len(known.get(key, b""))}
        if not stream and len(documents) != self._sequences:
            raise _unfit(f"prefill answered {len(documents)} sequences of {self._sequences}")

    def merge(self, body: bytes) -> bytes:
        """Decode's whole answer with prefill's input logprobs before its own."""
        try:
            answer = _answers.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _unfit(f"decode's answer: {error}") from None
        documents = answer if isinstance(answer, list) else [answer]
        if len(documents) != self._sequences:
            raise _unfit(f"decode answered {len(documents)} sequences of {self._sequences}")
        for index, document in enumerate(documents):
            self._put(document, index)
        return msgspec.json.encode(answer)

    def merge_events(self, data: bytes) -> bytes:
        """The same for whole events of a stream: those that carry input logprobs, else the first of each sequence."""
        out = bytearray()
        for payload in sse.events(data):
            document = _object(payload)
            meta = _object(document.get("meta_info", b"")) if document is not None else None
            if document is None or meta is None:
                out += b"data: " + payload.replace(b"\n", b"\ndata: ") + b"\n\n"
                continue
            index = _index(document, 0) or 0
            if index not in self._given or any(key in meta for key in KEYS):
                self._given.add(index)
                self._put(document, index)
            out += sse.event(document)
        return bytes(out)

    def _put(self, document: Fields, index: int) -> None:
        meta = _object(document.get("meta_info", b"")) or {}
        for key, values in self._of.get(index, {}).items():
            meta[key] = _joined(values, meta.get(key))
        document["meta_info"] = msgspec.Raw(msgspec.json.encode(meta))


def _is_list(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"["


def _joined(first: msgspec.Raw, second: msgspec.Raw | None) -> msgspec.Raw:
    """Two JSON arrays as one."""
    if second is None or not _is_list(second):
        return first
    inner = [part for part in (bytes(first)[1:-1].strip(), bytes(second)[1:-1].strip()) if part]
    return msgspec.Raw(b"[" + b",".join(inner) + b"]")


def _object(payload: bytes | msgspec.Raw) -> Fields | None:
    try:
        return _fields.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None


def _index(document: Fields, default: int) -> int | None:
    """Which sequence a document is of; None for what is no number."""
    raw = document.get("index")
    if raw is None:
        return default
    try:
        return msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        return None


def _documents(body: bytes) -> list[Fields]:
    try:
        answer = _answers.decode(body)
    except msgspec.ValidationError:
        raise _unfit("prefill's answer is not an object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unfit(f"prefill's answer is not JSON: {error}") from None
    return answer if isinstance(answer, list) else [answer]


def _unfit(message: str) -> RequestFailed:
    return RequestFailed(
        Failure(code="worker_failed", message=f"input logprobs: {message}", status=502, retryable=False)
    )
