"""Tickets: opaque text by which prefill lets a room be claimed that it computes, or computed, first.

A ticket names (instance, epoch, room). It grants nothing that the room's id does not grant already; it saves its holder
from asking the wrong incarnation. Text form: base64url without padding of a msgpack array and its xxh3-64.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
import xxhash

from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import U63, U64, Name


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a ticket says: the prefill instance's name, its epoch, and the room."""

    instance: Name
    epoch: U64
    room: U63


_decoder = msgspec.msgpack.Decoder(Ticket)
_MAX_TEXT = 1_024


def encode_ticket(ticket: Ticket) -> str:
    """The ticket's text, at most 512 characters. Raises LocalProtocolError for values out of bounds."""
    body = msgspec.msgpack.encode(ticket)
    try:
        _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise LocalProtocolError(f"the ticket does not fit the wire: {error}", code="message_malformed") from error
    text = base64.urlsafe_b64encode(body + xxhash.xxh3_64_digest(body)).rstrip(b"=").decode("ascii")
    if len(text) > 512:
        raise LocalProtocolError("the instance name is too long for a ticket", code="message_malformed", where="ticket")
    return text


def decode_ticket(text: str) -> Ticket:
    """Read a ticket's text. Raises RemoteProtocolError (`message_malformed`) for anything that is not one."""
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError("too long")
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, check = raw[:-8], raw[-8:]
        if xxhash.xxh3_64_digest(body) != check:
            raise ValueError("its check does not match")
        return _decoder.decode(body)
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not a ticket: {error}"[:200], where="ticket") from error
