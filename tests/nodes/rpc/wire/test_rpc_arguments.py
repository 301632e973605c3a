"""What commands take: numbers of parts, dataclasses and models in JSON; without sockets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic.dataclasses
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel

from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.arguments import Arguments
from flowctl.nodes.rpc.commands import HandlerKind, kind_of
from flowctl.nodes.rpc.message import octets, parts_of


@dataclass(frozen=True)
class Kick:
    peer: str
    seconds: int = 5


class Label(BaseModel):
    name: str = Field(max_length=3)
    numbers: list[int] = []


@dataclass
class Renamed:
    count: Annotated[int, Field(alias="n")]
    inner: Renamed | None = None


@pydantic.dataclasses.dataclass(config=ConfigDict(extra="allow"))
class Open:
    count: int


class Named(RootModel[dict[str, int]]):
    pass


class Given:
    """A message, as far as arguments look at it."""

    def __init__(self, *data: bytes) -> None:
        self.data = list(data)


WRONG = {
    "too few": (2, [b"x"], "a.b: it takes 2 parts, 1 came"),
    "too many": ((0, 1), [b"", b""], "a.b: it takes 0 to 1 part, 2 came"),
    "no part": (Kick, [], "a.b: it takes 1 part, 0 came"),
    "two parts": (Kick, [b"{}", b"{}"], "a.b: it takes 1 part, 2 came"),
    "no JSON": (Kick, [b"{"], "a.b: Invalid JSON: EOF while parsing an object at line 1 column 1"),
    "no object": (Kick, [b"[1]"], "a.b: Input should be an object"),
    "missing": (Kick, [b"{}"], "a.b: peer: Field required"),
    "wrong type": (Kick, [b'{"peer": 5}'], "a.b: peer: Input should be a valid string (it is 5)"),
    "unknown": (Kick, [b'{"peer": "x", "second": 1}'], "a.b: 'second' is no field, it has peer, seconds"),
    "of a model": (Label, [b'{"name": "abcd"}'], "a.b: name: String should have at most 3 characters (it is 'abcd')"),
    "deep inside": (
        Label,
        [b'{"name": "", "numbers": [1, "", "", "", ""]}'],
        "; and 1 more",
    ),
    "very many": (Label, [b'{"name": "", "numbers": [' + b'"",' * 2000 + b'""]}'], "a.b: 2001 values are wrong"),
    "for a terminal": (Named, [b'{"\\u001b[2J": "x"}'], r"a.b: \u001b[2J: Input should be a valid integer"),
    "of another name": (Renamed, [b'{"n": 1, "m": 1}'], "a.b: 'm' is no field, it has count, inner, n"),
    "unknown inside": (Renamed, [b'{"n": 1, "inner": {"n": 1, "m": 1}}'], "a.b: 'inner.m' is no field"),
    "nothing": (Renamed, [b"null"], "a.b: Input should be an object (it is None)"),
    "deep": (Kick, [b"[" * 100_000], "recursion limit exceeded"),
    "vast": (Kick, [b'{"peer": "x", "seconds": ' + b"9" * 100_000 + b"}"], "number out of range"),
    "no text": (Kick, [b"\xff\xfe"], "Invalid JSON"),
}


@pytest.mark.parametrize(("takes", "parts", "text"), WRONG.values(), ids=WRONG.keys())
def test_arguments_when_they_do_not_fit_are_told_with_the_field_and_what_is_allowed(takes, parts, text):
    with pytest.raises(RpcError) as raised:
        Arguments("a.b", takes).read(parts)
    assert raised.value.code == "WRONG_ARGUMENT"
    assert text in str(raised.value)
    assert len(str(raised.value)) < 500


def test_arguments_when_they_fit_are_given_to_the_handler():
    assert Arguments("a.b", 2).read([b"", b""]) == ()
    assert Arguments("a.b", (0, 2)).read([b""]) == ()
    assert Arguments("a.b", Kick).read([b'{"peer": "x"}']) == (Kick("x", 5),)
    assert Arguments("a.b", Label).read([b'{"name": "x", "numbers": [1]}']) == (Label(name="x", numbers=[1]),)
    assert Arguments("a.b", Open).read([b'{"count": 1, "more": 2}'])[0].count == 1


def plain(message: Given, kick: Kick) -> object:
    """Kick a peer."""
    return kick


async def coroutine(message: Given, kick: Kick) -> object:
    return kick


async def stream(message: Given, kick: Kick) -> Any:
    yield kick


def test_handler_when_its_command_takes_a_type_stays_of_its_kind():
    checked = [Arguments("a.b", Kick).checked(handler) for handler in (plain, coroutine, stream)]
    assert [kind_of(handler) for handler in checked] == list(HandlerKind)
    assert checked[0].__doc__ == plain.__doc__ == "Kick a peer."
    message = Given(b'{"peer": "x"}')

    async def main() -> list[object]:
        return [checked[0](message), await checked[1](message), *[item async for item in checked[2](message)]]

    assert asyncio.run(main()) == [Kick("x")] * 3


@pytest.mark.parametrize("takes", [-1, (2, 1), (1,), (1, 2, 3), "two", 1.5, True, str, list[int], Kick("x")])
def test_command_when_it_takes_something_else_is_refused(takes):
    with pytest.raises(LocalProtocolError, match="takes"):
        Arguments("a.b", takes)


def test_command_when_its_type_has_no_form_in_json_is_refused():
    @dataclass
    class Odd:
        lock: asyncio.Lock

    with pytest.raises(LocalProtocolError, match="no form in JSON"):
        Arguments("a.b", Odd)


def test_value_when_sent_or_returned_is_one_part_in_json():
    for value in (Kick("x", 7), Label(name="y", numbers=[1, 2]), Renamed(1, Renamed(2))):
        assert parts_of([value, "z"]) == [octets(value), b"z"]
        assert Arguments("a.b", type(value)).read(parts_of(value)) == (value,)
    assert json.loads(octets(Kick("x", 7))) == {"peer": "x", "seconds": 7}
    with pytest.raises(LocalProtocolError, match="bytes, the limit is 10"):
        parts_of(Kick("x" * 10), 10)
    with pytest.raises(LocalProtocolError, match="not type"):
        octets(Kick)
