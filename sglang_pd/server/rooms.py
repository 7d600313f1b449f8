"""One room a sequence: what a router's scalars and lists mean for batches and several answers a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_pd.config.address import Address, parse_host
from sglang_pd.config.schema import DEFAULT_BOOTSTRAP_PORT
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.protocol.room import Role
from sglang_pd.server.bodies import MAX_ROOM, MAX_SEQUENCES, Body


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sequence's hand-over happens. address: of prefill's control, empty at prefill."""

    room: int
    address: str


def places(body: Body, role: Role, prompts: int, answers: int) -> list[Place]:
    """A place for each sequence, prompt by prompt, `answers` of each.

    A single room stands for room, room + 1, ...; a list has a room for each sequence, or one for each prompt, whose
    further answers count on from it. Both legs get the same body, hence agree. Raises `RoomError` (400).
    """
    total = prompts * answers
    if total > MAX_SEQUENCES:
        raise _rejected("too many sequences", "n", f"at most {MAX_SEQUENCES}", total)
    rooms = _rooms(body, role, prompts, answers)
    if len(set(rooms)) != total or max(rooms) > MAX_ROOM:
        raise _rejected("rooms overlap or overflow", "bootstrap_room", f"{total} different ones", rooms[:8])
    if role is Role.PREFILL:
        return [Place(room, "") for room in rooms]
    hosts = _spread(body.bootstrap_host, prompts, answers, "bootstrap_host")
    ports = _spread(body.bootstrap_port, prompts, answers, "bootstrap_port")
    return [Place(room, _address(host, port)) for room, host, port in zip(rooms, hosts, ports, strict=True)]


def _rooms(body: Body, role: Role, prompts: int, answers: int) -> list[int]:
    given, total = body.bootstrap_room, prompts * answers
    if given is None:
        raise RoomError(
            f"this is a {role.value} worker: a request names the room of its hand-over",
            code="request_rejected",
            where="bootstrap_room",
            expected="an integer, or one for each sequence",
            hint="Send requests to a router: `sglang-pd router`.",
        )
    if isinstance(given, int):
        return list(range(given, given + total))
    if len(given) == total:
        return list(given)
    if len(given) == prompts:
        return [room + number for room in given for number in range(answers)]
    raise _rejected("not a room for each sequence", "bootstrap_room", f"{total} (or {prompts})", len(given))


def _spread(given: Any, prompts: int, answers: int, where: str) -> list[Any]:
    total = prompts * answers
    if not isinstance(given, list):
        return [given] * total
    if len(given) == total:
        return given
    if len(given) == prompts:
        return [value for value in given for _ in range(answers)]
    raise _rejected("not one for each sequence", where, f"{total} (or {prompts})", len(given))


def _address(host: str | None, port: int | None) -> str:
    if host is None:
        raise RoomError(
            "decode must be told where prefill's control listens",
            code="request_rejected",
            where="bootstrap_host",
            expected="a host",
            hint="Send requests to a router: `sglang-pd router`.",
        )
    try:
        parsed = parse_host(host.removeprefix("[").removesuffix("]"), where="bootstrap_host")
    except ConfigError as error:
        raise RoomError(
            error.message, code="request_rejected", where="bootstrap_host", actual=error.actual
        ) from None  # fmt: skip
    return Address(parsed, port or DEFAULT_BOOTSTRAP_PORT["prefill"]).zmq()


def _rejected(message: str, where: str, expected: object, actual: object) -> RoomError:
    return RoomError(message, code="request_rejected", where=where, expected=expected, actual=actual)
