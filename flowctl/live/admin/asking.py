"""Carries out operations for HTTP, from the one table of them: on threads of its own, a limited number at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import structlog

from flowctl.control.operations import ANSWERED, BY_NAME, Permission

_log: Final = structlog.get_logger("flowctl.admin")
CarryOut: TypeAlias = Callable[[str, bytes, Permission, str], bytes]
"""Carries out an operation: takes its name, the call, the caller's permission and name; returns the answer."""
MOST_WAITING: Final = 32
"""Calls of one kind, reading or changing, that are being carried out or wait for it."""
_STATUS: Final = {
    "FORBIDDEN": 403,
    "WRONG_ARGUMENT": 422,
    "NOT_POSSIBLE": 409,
    "NOT_FOUND": 404,
    "UNAUTHORIZED": 401,
    "WRONG_HOST": 421,
    "WRONG_METHOD": 405,
    "WRONG_ORIGIN": 403,
    "WRONG_TYPE": 415,
    "BUSY": 503,
    "TIMEOUT": 503,
    "ENDING": 503,
    "TOO_LONG": 422,
}


class CallRefused(Exception):  # noqa: N818 - what is refused need not be anybody's error
    """A request is not carried out."""

    def __init__(self, code: str, message: str, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        # code, message and hint: the body of the answer
        self.said: Final = {"code": code, "message": message, "hint": hint}
        self.status: Final = status or _STATUS.get(code, 500)  # of HTTP; that of the code, unless it is given


class OperationAsker:
    """Asks operations from a loop."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out: Final = carry_out
        # One thread that looks and one that changes, as of the other surface: changes are made in order.
        self._pools: Final = {
            True: ThreadPoolExecutor(1, thread_name_prefix="flowctl-admin-looks"),
            False: ThreadPoolExecutor(1, thread_name_prefix="flowctl-admin-changes"),
        }
        self._waiting: Final = {True: 0, False: 0}  # the loop's thread

    async def ask(
        self, name: str, given: Mapping[str, Any] | None = None, permission: Permission = Permission.BASIC
    ) -> bytes:
        looks = BY_NAME[name].looks
        if self._waiting[looks] >= MOST_WAITING:
            raise CallRefused("BUSY", "too many calls are waiting already", "try again")
        self._waiting[looks] += 1
        call = json.dumps(dict(given or {})).encode()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pools[looks], self._carry_out, name, call, permission, "admin")
        future.add_done_callback(lambda _: self._release_slot(looks))  # a caller may leave, its call goes on
        answer = await asyncio.shield(future)
        done = answer.startswith(ANSWERED)
        if not looks:
            _log.info("operation", name=name, caller="admin", done=done)
        if not done:
            error = json.loads(answer)["error"]
            raise CallRefused(error["code"], error["message"], error.get("hint"))
        return answer[len(ANSWERED) : -1]

    def _release_slot(self, looks: bool) -> None:  # noqa: FBT001 - which of two pools
        self._waiting[looks] -= 1

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
