"""The tables of the session's state machines: nothing unreachable, no way back from the end, faults put right."""

import pytest

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.states import (
    CLIENT_TABLE,
    CONNECTION_TABLE,
    STREAM_TABLE,
    ClientInput,
    ClientState,
    ConnectionInput,
    ConnectionState,
    StreamInput,
    StreamState,
    next_state,
)

MACHINES = [
    pytest.param(CONNECTION_TABLE, ConnectionState, ConnectionInput, id="connection"),
    pytest.param(STREAM_TABLE, StreamState, StreamInput, id="stream"),
    pytest.param(CLIENT_TABLE, ClientState, ClientInput, id="client"),
]

PEER = {
    *(ConnectionInput.HANDSHAKE_DONE, ConnectionInput.CONNECT, ConnectionInput.COMMAND),
    *(StreamInput.PUBLISH, StreamInput.PLAY, StreamInput.CONTROL),
    *(StreamInput.MEDIA, StreamInput.CLOSE, StreamInput.DELETE),
    *(ClientInput.HANDSHAKE_DONE, ClientInput.ACCEPTED, ClientInput.REJECTED, ClientInput.STREAM_CREATED),
    *(ClientInput.STARTED, ClientInput.REFUSED, ClientInput.FAIL),
}


@pytest.mark.parametrize(("table", "states", "inputs"), MACHINES)
def test_every_state_is_reachable_and_every_input_used(table, states, inputs):
    reached, frontier = set(), {next(iter(states))}
    while frontier:
        reached |= frontier
        frontier = {after for (before, _), after in table.items() if before in reached} - reached
    assert reached == set(states)
    assert {event for _, event in table} == set(inputs)


@pytest.mark.parametrize(("table", "states", "inputs"), MACHINES)
def test_missing_pair_is_the_fault_of_who_gave_the_input(table, states, inputs):
    for state in states:
        for event in inputs:
            if (state, event) in table:
                assert next_state(table, state, event, "machine") is table[state, event]
                continue
            with pytest.raises(RemoteProtocolError if event in PEER else LocalProtocolError) as caught:
                next_state(table, state, event, "machine")
            assert state.value in str(caught.value)


def test_nothing_leads_back_from_the_end():
    assert {after for (before, _), after in CONNECTION_TABLE.items() if before is ConnectionState.CLOSED} == {
        ConnectionState.CLOSED
    }
    assert not [pair for pair in STREAM_TABLE if pair[0] is StreamState.DELETED]
