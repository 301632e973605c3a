"""What a node has done and what it has to do, as frozen figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowctl.nodes.rpc.jobs.dispatcher import JobStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """A node at one moment; counts are since the start."""

    incoming: int  #: peers that have connected to us
    outgoing: int  #: connections that we have opened
    waiting: int  #: requests of ours without an outcome
    running: int  #: coroutines of handlers that wait
    called_count: Mapping[str, int]  #: times that each command ran or was queued
    refused_count: Mapping[str, int]  #: commands and requests of others that were refused, by code
    failed_count: int  #: handlers that raised
    cancelled_count: int  #: handlers cancelled since nobody wanted their answer any more
    asked_count: int  #: requests that we have sent
    late_count: int  #: replies and failures to what waits no more
    malformed_count: int  #: messages that were none, or too long, or out of place
    unsent_count: int  #: times that a message found too much waiting for its peer: it was dropped, or put off
    jobs: JobStatistics  #: worker threads and their queues
