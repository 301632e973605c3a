"""What the API answers, typed: its description is made of these, and tests hold the answers against them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field

State = Literal["READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"]


class Problem(BaseModel):
    """Why a request was not carried out."""

    code: str
    message: str
    hint: str | None = None


class Answer(BaseModel):
    """What every answer may have: a warning says what was not done, or by whom it was not answered."""

    warning: str | None = None


class Found(BaseModel):
    """Which page of how many."""

    offset: int
    limit: int
    streams: int | None = None
    connections: int | None = None
    bans: int | None = None
    viewers: int | None = None


class Axis(BaseModel):
    """What waits on one axis, and its marks; a mark of 0 is off."""

    value: float
    low: int
    soft: int
    hard: int


class Axes(BaseModel):
    """What waits for a peer, on three axes."""

    bytes: Axis
    messages: Axis
    age_ms: Axis


class Renditions(BaseModel):
    """How a viewer of a set came to its rendition, and what it had before."""

    of: int = Field(description="how many renditions the set has")
    for_s: float = Field(description="how long it has been in its rendition")
    why: str
    ups: int = Field(description="switches to a larger rendition")
    downs: int
    failed: int = Field(description="switches to a larger rendition that its line did not carry")
    shares: dict[str, float] = Field(description="share of its time in each, 0 to 1, the smallest first")


class Connection(BaseModel):
    """One connection, as lists show it."""

    connection: int
    peer: str
    protocol: str
    role: Literal["viewer", "publisher", "none"]
    stream: str | None
    state: State
    since_s: float = Field(description="how long it has been in that state")
    axes: Axes
    delay_ms: float = Field(description="how far behind the peer is, our queue and the kernel's")
    pictures: float = Field(description="share of the pictures of the last 20 s that were sent, 0 to 1")
    rendition: str | None = Field(description="which rendition it is in, where it follows a set of them")
    renditions: Renditions | None
    rate_bytes_per_s: float | None = Field(description="what the peer takes, where it was measured")
    stalled_s: float
    queued_bytes: int
    sent_bytes: int
    received_bytes: int
    dropped: int
    drops: dict[str, dict[str, int]] = Field(description="messages dropped, by reason and class")
    open_s: float
    agent: str
    why: str
    worker: int | None = None


class LedgerRow(BaseModel):
    """One thing that was done to a peer."""

    ago_s: float
    what: str
    state: State | None
    why: str


class ConnectionInFull(Connection):
    """One connection with its limits and its ledger."""

    streams: list[str]
    limits: str
    time_in_states_s: dict[State, float]
    longest_stall_s: float
    returns: int
    ledger: list[LedgerRow]


class Connections(Answer):
    """A page of connections."""

    connections: list[Connection]
    found: Found


class OneConnection(Answer):
    connection: ConnectionInFull


class RenditionOfStream(BaseModel):
    """One rendition of a stream that is a set of them."""

    rendition: str
    bit_rate: int | None = Field(description="what it takes of a line, with its sound; null: not known yet")
    codec: str | None
    size: str | None = Field(description="width and height, like 1280x720")
    viewers: int
    remark: str = Field(description="whether viewers have to wait for it, how its times are made those of the set")


class CommandOfStream(BaseModel):
    """A command that is run for a stream."""

    command: str
    state: str
    pid: int | None
    starts: int
    publishes: list[str]
    why: str


class Stream(BaseModel):
    stream: str
    publisher: str | None
    connection: int | None
    media: str
    codecs: dict[str, str]
    viewers: int
    states: dict[State, int]
    slow: int
    standby: int
    commands: list[CommandOfStream] = Field(description="that the server runs for it, see run")
    unwritten: dict[str, str] = Field(description="what is to be recorded, or written as HLS, and is not: why")
    in_bytes: int
    in_messages: int
    in_frames: int
    sent_bytes: int
    renditions: list[RenditionOfStream] = Field(description="those of a set, the largest first; else none")
    worker: int | None = None


class Streams(Answer):
    """A page of streams."""

    streams: list[Stream]
    found: Found


class Kicked(Answer):
    """How many connections were ended, and the numbers of some."""

    kicked: int
    connections: list[int]


class Banned(Answer):
    """What is in force for the network."""

    cidr: str
    action: str
    expires: str | None = None
    reason: str = ""
    ended: int
    in_store: bool
    kept: str


class Lifted(Answer):
    """What was in force for the network."""

    lifted: list[dict[str, Any]]


class Bans(Answer):
    """A page of bans."""

    bans: list[dict[str, Any]]
    found: Found


class LimitsShown(Answer):
    """Limits in force, and what they were where they were set."""

    soft: str
    hard: str
    low: str
    target_delay: str
    hard_policy: str
    limits: str
    was: str | None = None
    connections: int | None = None
    connection: int | None = None


class Draining(Answer):
    """How long the server is still there."""

    draining: bool
    again: bool
    ends_within_s: float
    connections: int


class Change(BaseModel):
    """One change of the running server."""

    version: int
    at: float
    what: str
    origin: str
    detail: dict[str, Any]


class Changes(Answer):
    """What was changed; `whole`: nothing in between is missing."""

    run: str
    version: int
    whole: bool
    changes: list[Change]


class Stats(Answer):
    """Figures of the server, its streams, and its viewers that are slow."""

    server: dict[str, Any]
    streams: list[Stream]
    viewers: list[Connection]
    found: Found


class Anything(Answer):
    """An answer whose names depend on the settings of the server."""


ANSWERS: Final[dict[str, type[BaseModel]]] = {
    "stats": Stats,
    "streams": Streams,
    "connections": Connections,
    "kick": Kicked,
    "limits": LimitsShown,
    "ban": Banned,
    "unban": Lifted,
    "bans": Bans,
    "drain": Draining,
    "reload": Anything,
    "changes": Changes,
}
"""Model of the answer by operation; the answers of other operations have no fixed form."""
