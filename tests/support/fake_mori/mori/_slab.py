"""Statuses as C++ sees them: places in memory, reused as soon as their owner lets go."""

from __future__ import annotations

import enum
import threading


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


UNFINISHED = (StatusCode.INIT, StatusCode.IN_PROGRESS)

_changed = threading.Condition(threading.RLock())
_codes: list[StatusCode] = []
_messages: list[str] = []
_free: list[int] = []


def update(place: int, code: StatusCode, message: str = "") -> None:
    """What the library does to whatever lies at that place now."""
    with _changed:
        if code is not StatusCode.SUCCESS and _codes[place] not in UNFINISHED:
            return
        _codes[place], _messages[place] = code, message
        _changed.notify_all()


class TransferStatus:
    def __init__(self) -> None:
        with _changed:
            if not _free:
                _free.append(len(_codes))
                _codes.append(StatusCode.INIT)
                _messages.append("")
            self._place = _free.pop()
            _codes[self._place], _messages[self._place] = StatusCode.INIT, ""

    def __del__(self) -> None:
        with _changed:
            _free.append(self._place)

    def Code(self) -> StatusCode:
        return _codes[self._place]

    def Message(self) -> str:
        return _messages[self._place]

    def Init(self) -> bool:
        return self.Code() is StatusCode.INIT

    def InProgress(self) -> bool:
        return self.Code() is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self.Code() is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self.Code() not in (StatusCode.SUCCESS, *UNFINISHED)

    def Update(self, code: StatusCode, message: str) -> None:
        update(self._place, code, message)

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        with _changed:
            _changed.wait_for(lambda: not self.InProgress(), None if timeout_ms < 0 else timeout_ms / 1000)
            return self.Code()

    def Wait(self) -> StatusCode:
        return self.WaitFor()
