"""Where workers claim names and are told what changes: the directory in its supervisor, by messages.

All of it runs on one thread, and everything is a message, answers too, so that a worker is told things in the order in
which they were decided. Messages are plain values for JSON. A claim for a name whose owner has it already is held until
the worker of that publisher has said whether it has fallen silent; one that does not say so has fallen silent itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from flowctl.core.outcomes.pending import Pending
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.cluster.names.directory import Directory, Holder, Notice
from flowctl.live.config import LiveConfig
from flowctl.live.namebook import ClaimVerdict, NameRules, Owner
from flowctl.live.settings.levels import Role

Values = dict[str, Any]
"""A message between a worker and the desk."""
REFUSED: Final = "refused"
"""Outcome of a claim beside those of `ClaimVerdict`."""
_ASK_S: Final = 1.0
"""Time that a worker has to say whether a publisher has fallen silent: less than a publish waits for its name."""


class _HeldClaim(NamedTuple):
    """A claim that waits for a worker's word on its rival."""

    worker: int
    values: Values
    rival: Holder


def _rules(config: LiveConfig, name: str) -> NameRules:
    settings = config.at(name, Role.PUBLISHER)
    return NameRules(settings.second_publisher, settings.return_grace_s, settings.publishers_per_address)


class NamesDesk:
    """Answers what workers ask of the directory. One thread."""

    def __init__(
        self, config: LiveConfig, send: Callable[[int, Values], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory: Final = Directory(lambda name: _rules(config, name))
        self._send: Final = send
        self._clock: Final = clock
        self._held: Final[Pending[tuple[int, int], _HeldClaim]] = Pending()  # by worker and number of the claim

    def asked(self, worker: int, values: Values) -> None:
        now, name = self._clock(), values["name"]
        self._tell(self.directory.expire(now))
        match values["ask"]:
            case "claim":
                self._claim(worker, values, None)
            case "silent":
                held = self._held.take((values["worker"], values["claim"]))
                if held is not None:
                    self._decide_held(held, silent=bool(values["silent"]))
            case "release":
                self._held.take((worker, values["claim"]))
                holder = Holder(worker, values["number"])
                self._tell(self.directory.release(name, holder, now, grace=values["grace"]))
            case "view":
                self._tell(self.directory.view(name, worker))
            case "unview":
                self.directory.unview(name, worker)

    def _claim(self, worker: int, values: Values, silent: bool | None) -> None:  # noqa: FBT001 - None: not asked
        name = values["name"]
        owner = Owner(values["address"], values["user"], bytes.fromhex(values["key"]))
        answer = {"tell": "claim", "name": name, "claim": values["claim"], "why": "", "limit": ""}
        try:
            decision = self.directory.claim(name, Holder(worker, values["number"]), owner, silent=silent)
        except BusyError as error:
            self._send(worker, answer | {"verdict": REFUSED, "why": str(error)})
            return
        except LimitExceededError as error:
            self._send(worker, answer | {"verdict": REFUSED, "why": str(error), "limit": error.limit})
            return
        holder = decision.holder
        if decision.verdict is ClaimVerdict.ASK and holder is not None:
            self._held.add((worker, values["claim"]), _HeldClaim(worker, values, holder), self._clock() + _ASK_S)
            self._send(holder.worker, {"tell": "silent?", "name": name, "claim": values["claim"], "worker": worker})
            return
        # The claim's answer first: what is told of the name after that is about its new publisher.
        self._send(worker, answer | {"verdict": decision.verdict.value})
        self._tell(decision.notices)

    def _decide_held(self, held: _HeldClaim, *, silent: bool) -> None:
        """Decide a claim now that its rival's state is known, unless another one has the name meanwhile."""
        same = self.directory.holder_of(held.values["name"]) == held.rival
        self._claim(held.worker, held.values, silent if same else None)

    def gone(self, worker: int) -> None:
        self._held.take_where(lambda key, _: key[0] == worker)
        self._tell(self.directory.expire(self._clock()))
        self._tell(self.directory.worker_gone(worker, self._clock()))

    def tick(self) -> None:
        now = self._clock()
        for _, held in self._held.take_due(now):
            self._decide_held(held, silent=True)
        self._tell(self.directory.expire(now))

    def _tell(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            message = {"tell": notice.told.value, "name": notice.name, "value": notice.value, "keep": notice.keep}
            self._send(notice.worker, message)
