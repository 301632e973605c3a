"""A receiver that applies numbers, and may be killed at any time: ``python -m messenger.applier ADDRESS STORE``.

Each message is a number; its effect is a row of the table ``effects``, written in the transaction that notes the
message as received. There is no rule against two rows of one number: what is applied twice is seen.
"""

from __future__ import annotations

import asyncio
import json
import sys

from flowctl.nodes.messenger.message import Destination, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.storefile import Transaction
from rpc.server import loop_factory


def make_table(transaction: Transaction) -> None:
    """Make the table of effects."""
    transaction.execute("CREATE TABLE IF NOT EXISTS effects (number INTEGER NOT NULL)")


def apply(_: Messenger, message: ReceivedMessage) -> None:
    number = int(message.message.partition(b" ")[0])
    message.apply(lambda transaction: transaction.execute("INSERT INTO effects VALUES (?)", (number,)))


async def main(address: str, store: str) -> None:
    """Receive until ended."""
    async with Messenger(None, "applier", open_store=open_store(store, prepare=make_table)) as messenger:
        messenger.listen_for_connection(Destination("applier", address), "applier", apply)
        print(json.dumps({"ready": True}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(*sys.argv[1:]))
