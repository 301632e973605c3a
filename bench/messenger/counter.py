"""A sender of numbers that may be killed at any time: ``python -m messenger.counter ADDRESS STORE COUNT BODY_BYTES``.

It sends 0 to COUNT - 1, one message each, and goes on after a restart where it was: how far it came stands in a table
of its own, written in the transaction that puts the message into the outbox. It says so when all are acknowledged, and
gone from the outbox, and ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
import sys
from functools import partial
from typing import Final

from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.storefile import Transaction
from rpc.server import loop_factory

SETTINGS: Final = DeliverySettings(
    window=2000, retry=Backoff(first_s=0.05, factor=1.5, most_s=1.0, jitter=0.5), max_attempts=None
)
_IDLE_S: Final = 0.01


def make_table(transaction: Transaction) -> None:
    """Make the table that says how far we came."""
    transaction.execute("CREATE TABLE IF NOT EXISTS progress (name TEXT PRIMARY KEY, next_number INTEGER NOT NULL)")
    transaction.execute("INSERT OR IGNORE INTO progress VALUES ('numbers', 0)")


def advance(number: int, transaction: Transaction) -> None:
    """Note that a number is in the outbox."""
    transaction.execute("UPDATE progress SET next_number = ? WHERE name = 'numbers'", (number + 1,))


def next_number(store: str) -> int:
    """Return the first number that is not in the outbox, and never was."""
    connection = sqlite3.connect(store)
    try:
        found: int = connection.execute("SELECT next_number FROM progress").fetchone()[0]
    finally:
        connection.close()
    return found


async def main(address: str, store: str, count: int, body_bytes: int) -> None:
    """Send until all are acknowledged."""
    body = b" " + bytes(body_bytes)
    opens = open_store(store, prepare=make_table)
    async with Messenger(None, "counter", settings=SETTINGS, open_store=opens) as messenger:
        to = messenger.make_connection(Destination("applier", address))
        print(json.dumps({"ready": True}), flush=True)
        for number in range(next_number(store), count):
            await messenger.send(to, b"%d%b" % (number, body), effect=partial(advance, number))
        while messenger.pending_count():  # noqa: ASYNC110 (messages of an earlier life have no handler to tell us)
            await asyncio.sleep(_IDLE_S)
        figures = dataclasses.asdict(messenger.statistics())
    print(json.dumps({"done": True, **figures}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
