"""The error tree of sglang-pd: stable codes, facts instead of prose, the first cause kept.

Every error says what failed, where, what was expected, what was found and what to do. A code never changes its
meaning once released; `docs/operations.md` has a runbook entry for each. An error crosses the wire as an `ErrorInfo`
and is rebuilt on the other side with the same code, so that whoever waits for a room learns the first cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

MAX_TEXT = 2_000
"""Most characters of one text of an `ErrorInfo`: what we send is cut to it, a longer one is refused."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What every error of a code has in common."""

    summary: str
    http_status: int
    retryable: bool


CODES: dict[str, CodeFacts] = {
    # configuration and start
    "config_invalid": CodeFacts("a configuration value is not acceptable", 500, False),
    "insecure_refused": CodeFacts("an unsafe setting was not explicitly allowed", 500, False),
    "backend_unknown": CodeFacts("no backend of that name exists", 500, False),
    "backend_unavailable": CodeFacts("a backend's library or device is missing here", 500, False),
    "backend_unsupported": CodeFacts("this backend cannot do what was asked of it", 500, False),
    # index spaces and manifests
    "space_invalid": CodeFacts("an index space's facts contradict each other", 500, False),
    "space_mismatch": CodeFacts("an index was given to a consumer of another index space", 500, False),
    "index_out_of_space": CodeFacts("an index is at or beyond its own space's extent", 500, False),
    "kind_unknown": CodeFacts("no state kind of that name is registered", 500, False),
    "manifest_invalid": CodeFacts("a manifest's facts contradict each other", 500, False),
    # wire
    "message_malformed": CodeFacts("a message does not decode or exceeds a bound", 400, False),
    "version_unsupported": CodeFacts("the peer speaks another major protocol version", 400, False),
    "feature_unsupported": CodeFacts("the peer requires a feature that is not spoken here", 400, False),
    "peer_incompatible": CodeFacts("two instances cannot hand over exactly; the verdict lists why", 409, False),
    "peer_unknown": CodeFacts("no verdict exists for that instance", 404, True),
    "peer_duplicate": CodeFacts("ranks of that manifest speak in another conversation, which stands", 409, True),
    "epoch_stale": CodeFacts("the message speaks of an incarnation that is gone", 409, True),
    # planning
    "coverage_incomplete": CodeFacts("the plans do not write every live byte exactly once", 500, False),
    "count_mismatch": CodeFacts("an index list does not have the length its own rule demands", 500, False),
    "index_invalid": CodeFacts("an index list is not acceptable: reserved, repeated or masked", 500, False),
    "prefix_unaligned": CodeFacts("the prefix held by decode is not on a page and group boundary", 400, False),
    # rooms
    "room_duplicate": CodeFacts("that room is already open", 409, False),
    "room_unknown": CodeFacts("no such room here", 404, False),
    "room_expired": CodeFacts("the room's deadline passed while its peer was alive", 504, True),
    "lease_expired": CodeFacts("a computed room was not claimed within its lease", 504, True),
    "prompt_mismatch": CodeFacts("prefill and decode hold different prompts under one room", 409, False),
    "request_mismatch": CodeFacts("prefill and decode were asked for different answers under one room", 409, False),
    "illegal_transition": CodeFacts("the event is not legal in the room's state", 500, False),
    "room_aborted": CodeFacts("the room was aborted on request", 499, False),
    "prompt_too_long": CodeFacts("the request can never fit", 400, False),
    "prompt_empty": CodeFacts("the request has no tokens", 400, False),
    "request_duplicate": CodeFacts("a request of that id is still queued or running here", 409, False),
    "pool_exhausted": CodeFacts("no memory is free for the request now", 503, True),
    "queue_full": CodeFacts("the queue is at its limit", 429, True),
    "draining": CodeFacts("the worker is stopping and takes no new rooms", 503, True),
    "request_rejected": CodeFacts("the engine refused the request", 400, False),
    # transfers
    "peer_lost": CodeFacts("the peer process is gone", 502, True),
    "range_conflict": CodeFacts("a record claims bytes that are written already or not expected", 502, True),
    "transfer_failed": CodeFacts("the transport failed; nothing more will land", 502, True),
    "transfer_unknown": CodeFacts("the transport cannot say whether more bytes will land", 502, True),
    "transfer_timeout": CodeFacts("the transfer passed its deadline; bytes may still land", 504, True),
    "segment_invalid": CodeFacts("a transfer names memory that is not registered, or runs past it", 500, False),
    "memory_refused": CodeFacts("memory cannot be registered or exported by this backend", 500, False),
    "ranges_incomplete": CodeFacts("not every expected (writer, component) range arrived", 502, True),
    "digest_mismatch": CodeFacts("the state that arrived is not the state that was sent", 502, True),
    "lease_invalid": CodeFacts("memory was used in a state that forbids it", 500, False),
    "quarantine_full": CodeFacts("too much memory waits for a fence", 503, True),
    # router and server
    "path_unknown": CodeFacts("no such path on this server", 404, False),
    "unauthorized": CodeFacts("the request carries no acceptable bearer token", 401, False),
    "request_too_large": CodeFacts("the request body exceeds its bound", 413, False),
    "worker_unavailable": CodeFacts("no worker of a leg takes requests now; nothing was dispatched", 503, True),
    "worker_failed": CodeFacts("a worker could not be reached, broke off or answered with an error", 502, True),
    "internal": CodeFacts("a defect of sglang-pd", 500, False),
}
"""Every code there is, with its meaning, HTTP status hint and whether a new room may succeed."""


def wire_text(text: str) -> str:
    """The text as it can travel: what UTF-8 has no form for (half a surrogate pair) is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels: in room failures, verdicts, HTTP bodies and records."""

    code: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    message: Text
    where: Text = ""
    expected: Text = ""
    actual: Text = ""
    hint: Text = ""
    details: Annotated[dict[Text, Text], msgspec.Meta(max_length=32)] = {}

    def __post_init__(self) -> None:
        # Half a surrogate pair (a file's name, a client's text) has no UTF-8: such an error would never leave.
        for name in ("message", "where", "expected", "actual", "hint"):
            text = getattr(self, name)
            if isinstance(text, str) and not text.isascii():
                msgspec.structs.force_setattr(self, name, wire_text(text)[:MAX_TEXT])
        if self.details:
            details = {wire_text(k)[:MAX_TEXT]: wire_text(v)[:MAX_TEXT] for k, v in self.details.items()}
            msgspec.structs.force_setattr(self, "details", details)

    def __str__(self) -> str:
        return _sentence(self)


def _sentence(error: ErrorInfo | PdError) -> str:
    """An error in one line, the same whether it was raised here or travelled: `[code] where: message (facts). hint`."""
    parts = [f"[{error.code}] "]
    if error.where:
        parts.append(f"{error.where}: ")
    parts.append(error.message)
    facts = [f"{name} {value}" for name, value in (("expected", error.expected), ("got", error.actual)) if value != ""]
    if facts:
        parts.append(f" ({', '.join(facts)})")
    if error.details:
        parts.append(" {" + ", ".join(f"{k}={v}" for k, v in error.details.items()) + "}")
    if error.hint:
        parts.append(f". {error.hint}")
    return "".join(parts)


class PdError(Exception):
    """Base of every error of sglang-pd. Abstract: raise a subclass, or use `from_info` for one that travelled.

    `where` names the field, region, peer or room; `expected` and `actual` are shown as given; `hint` says what to do;
    further keyword arguments are kept as text in `details`.
    """

    default_code: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        /,  # details may bear any name, `self` and `message` too: a peer chooses them
        *,
        code: str = "",
        where: str = "",
        expected: object = "",
        actual: object = "",
        hint: str = "",
        **details: object,
    ) -> None:
        code = code or self.default_code
        if code not in CODES:
            raise TypeError(f"{type(self).__name__} cannot be raised without a code of errors.CODES, got {code!r}")
        self.code = code
        self.message = message
        self.where = where
        self.expected = expected
        self.actual = actual
        self.hint = hint
        self.details = details
        super().__init__(_sentence(self))

    @property
    def http_status(self) -> int:
        """The HTTP status a server should answer with."""
        return CODES[self.code].http_status

    @property
    def retryable(self) -> bool:
        """True where the same request in a new room may succeed."""
        return CODES[self.code].retryable

    def info(self) -> ErrorInfo:
        """The error in its wire form; texts are cut at `MAX_TEXT` characters."""

        def cut(value: Any) -> str:
            return str(value)[:MAX_TEXT]

        return ErrorInfo(
            code=self.code,
            message=cut(self.message),
            where=cut(self.where),
            expected=cut(self.expected),
            actual=cut(self.actual),
            hint=cut(self.hint),
            details={cut(k): cut(v) for k, v in list(self.details.items())[:32]},
        )


class ConfigError(PdError):
    """A configuration value is missing, unknown or contradictory."""

    default_code = "config_invalid"


class SpaceError(PdError):
    """An index space cannot exist as described."""

    default_code = "space_invalid"


class SpaceMismatch(PdError):
    """An index reached a consumer that does not accept its space."""

    default_code = "space_mismatch"


class IndexOutOfSpace(PdError):
    """An index is negative, or at or over the extent of its own space."""

    default_code = "index_out_of_space"


class ManifestError(PdError):
    """A region, component or manifest is invalid; `where` is the path of the field."""

    default_code = "manifest_invalid"


class ProtocolError(PdError):
    """Somebody broke the protocol. Abstract."""


class LocalProtocolError(ProtocolError):
    """The caller used the protocol wrongly (an illegal event, say); the state is unchanged."""

    default_code = "illegal_transition"


class RemoteProtocolError(ProtocolError):
    """The peer sent what it must not; costs it a refusal, never a thread here."""

    default_code = "message_malformed"


class IncompatiblePeer(PdError):
    """The verdict on two instances is a refusal."""

    default_code = "peer_incompatible"


class PlanError(PdError):
    """A plan cannot be compiled, proven or bound; nothing was written."""

    default_code = "coverage_incomplete"


class RoomError(PdError):
    """One room ends; the error names why. Always raised with a code."""


class TransferError(PdError):
    """A transfer did not reach DONE."""

    default_code = "transfer_failed"


class IntegrityError(PdError):
    """Bytes arrived that are not the bytes that were sent."""

    default_code = "digest_mismatch"


class BackendUnavailable(PdError):
    """A backend cannot run here: the package, library file or device that is missing, and how to get it."""

    default_code = "backend_unavailable"


class BackendError(PdError):
    """A backend refuses what it was asked: capability, memory, or a segment range."""

    default_code = "backend_unsupported"


class RemoteError(PdError):
    """An error that happened elsewhere and travelled here with its first cause."""


def from_info(info: ErrorInfo) -> RemoteError:
    """Rebuild a travelled error. An unknown code (a newer peer) becomes `internal` and is named in the details."""
    details: dict[str, object] = {k: v for k, v in info.details.items() if k.isidentifier()}
    for own in ("code", "where", "expected", "actual", "hint", "message"):
        details.pop(own, None)
    code = info.code
    if code not in CODES:
        details["peer_code"] = code
        code = "internal"
    return RemoteError(
        info.message,
        code=code,
        where=info.where,
        expected=info.expected,
        actual=info.actual,
        hint=info.hint,
        **details,
    )
