"""The mini-protocol as a table."""

from __future__ import annotations

import pytest

from flowctl.errors import RemoteProtocolError
from flowctl.nodes.diffusion.wire.protocol import (
    SIZE_LIMIT_BYTES,
    TABLE,
    TIME_LIMIT_S,
    Announced,
    Done,
    Init,
    Input,
    Prove,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    State,
    Subscribe,
    Tell,
    after,
    input_of,
)

MESSAGES = {
    Input.INIT: Init(),
    Input.PROVE: Prove(b"key"),
    Input.SUBSCRIBE: Subscribe(True, b"*"),
    Input.TELL: Tell(b"words"),
    Input.REQUEST_IDS_BLOCKING: RequestIds(True, 0, 1),
    Input.REQUEST_IDS_NONBLOCKING: RequestIds(False, 0, 1),
    Input.REPLY_IDS: ReplyIds((Announced(b"a"),)),
    Input.REQUEST_OBJECTS: RequestObjects((b"a",)),
    Input.REPLY_OBJECTS: ReplyObjects((b"x",)),
    Input.DONE: Done(),
}
BY_CLIENT = {
    Input.INIT,
    Input.PROVE,
    Input.SUBSCRIBE,
    Input.TELL,
    Input.REQUEST_IDS_BLOCKING,
    Input.REQUEST_IDS_NONBLOCKING,
    Input.REQUEST_OBJECTS,
    Input.DONE,
}


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
@pytest.mark.parametrize("given", list(Input), ids=lambda given: given.name)
def test_step_when_taken_follows_the_table_or_is_an_error(state, given):
    """A pair in the table gives the next state; any other is an error that names both (OD-09)."""
    message = MESSAGES[given]
    assert input_of(message) is given
    if (state, given) in TABLE:
        assert after(state, message) is TABLE[state, given]
        return
    with pytest.raises(RemoteProtocolError) as caught:
        after(state, message)
    assert caught.value.code == "UnexpectedMessage"
    assert state.value in str(caught.value)
    assert given.value in str(caught.value)


def test_table_when_looked_at_whole_lets_the_client_speak_in_init_and_idle_and_the_server_else():
    """While the server waits until it has something new, the client may say what it wants, and tell of itself."""
    by_client = {State.INIT, State.IDLE}
    for state, given in TABLE:
        waits = state is State.IDS_BLOCKING and given in {Input.SUBSCRIBE, Input.TELL}
        assert (given in BY_CLIENT) == (state in by_client or waits)
    assert {state for state, _ in TABLE} == set(State) - {State.DONE}


def test_limits_when_looked_at_are_those_of_the_protocol():
    assert {size: list(SIZE_LIMIT_BYTES.values()).count(size) for size in SIZE_LIMIT_BYTES.values()} == {
        65_535: 2,
        2_500_000: 3,
        0: 1,
    }
    assert {state: limit for state, limit in TIME_LIMIT_S.items() if limit is not None} == {
        State.INIT: 10.0,
        State.IDS_NONBLOCKING: 10.0,
        State.OBJECTS: 10.0,
    }
