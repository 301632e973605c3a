"""Services: one class of both sides, typed calls and replies, streams, and health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

import pytest
from pydantic import Field

from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.node import RpcNode


@dataclass
class Order:
    dish: str
    count: int = 1


@dataclass
class Bill:
    orders: list[Order]
    cents: int


class Shop(Protocol):
    async def price(self, order: Order) -> int: ...
    def order(self, orders: list[Order]) -> Bill: ...
    def dishes(self, like: str) -> AsyncIterator[Order]: ...
    async def picture(self, dish: str) -> bytes: ...
    async def close(self) -> None: ...
    async def _hidden(self) -> None: ...


_T = TypeVar("_T")


class Kitchen:
    def __init__(self):
        self.closed = 0

    async def price(self, order):
        """Return the price of an order in cents."""
        return order.count * 250

    def order(self, orders):
        return Bill(orders, 250 * len(orders))

    async def dishes(self, like):
        for number in range(3):
            yield Order(like, number)

    async def picture(self, dish):
        return b"\0" + dish.encode()

    async def close(self):
        self.closed += 1


def serving(kitchen=None, service=Shop):
    node = RpcNode()
    node.add_category("shop")
    node.add_service("shop", service, kitchen or Kitchen())
    return node


async def with_shop(ask, kitchen=None):
    """Return what `ask` returns, given a caller, a connection and a stub of the shop."""
    server = serving(kitchen)
    address = server.listen_plain("tcp://127.0.0.1:*")
    async with server, RpcNode() as node:
        conn = await node.connect(address)
        return await ask(node, conn, node.service(Shop, conn, "shop"))


def test_service_when_called_by_a_stub_answers_with_values_of_its_types():
    kitchen = Kitchen()

    async def ask(node, conn, shop):
        return (
            await shop.price(Order("soup", 2)),
            await shop.order([Order("soup"), Order("pie", 3)]),
            [item async for item in shop.dishes("tea")],
            await shop.picture("ä"),
            await shop.close(),
        )

    price, bill, dishes, picture, nothing = asyncio.run(with_shop(ask, kitchen))
    assert price == 500
    assert bill == Bill([Order("soup"), Order("pie", 3)], 500)
    assert dishes == [Order("tea", number) for number in range(3)]
    assert picture == b"\0\xc3\xa4"
    assert nothing is None
    assert kitchen.closed == 1


def test_service_when_called_by_names_takes_and_answers_parts():
    async def ask(node, conn, shop):
        told = json.loads((await node.call(conn, "rpc.describe"))[0])
        return (
            await node.call(conn, "shop.price", Order("soup", 3)),
            await node.call(conn, "shop.price", '{"dish": "soup"}', returns=int),
            await node.call(conn, "shop.close"),
            {item["name"]: item for item in told["commands"]},
        )

    plain, typed, nothing, commands = asyncio.run(with_shop(ask))
    assert (plain, typed, nothing) == ([b"750"], 250, [])
    assert "shop._hidden" not in commands
    assert commands["shop.price"]["summary"] == "Return the price of an order in cents."
    assert commands["shop.price"]["takes"]["json"]["required"] == ["dish"]
    assert (commands["shop.dishes"]["kind"], commands["shop.close"]["takes"]) == ("stream", {"parts": [0, 0]})


@pytest.mark.parametrize(
    ("command", "parts", "said"),
    [
        ("price", [], "price has 0 parts, it must have 1"),
        ("price", ["a", "b"], "price has 2 parts, it must have 1"),
        ("price", ['{"dish": 5}'], "price: 'dish': Input should be a valid string"),
        ("price", ['{"dish": "pie", "cuont": 7}'], "price: 'cuont': Unexpected keyword argument"),
        ("price", ["null"], "price: it is null"),
        ("order", ["[" + ",".join(["0"] * 2000) + "]"], "order: 2000 values are wrong"),
        ("price", ["no json"], "price: Invalid JSON"),
        ("picture", [b"\xff"], "picture: it is no text in UTF-8"),
        ("close", ["x"], "close has 1 parts, it must have 0"),
    ],
)
def test_service_when_given_something_else_refuses_it_with_a_text(command, parts, said):
    async def ask(node, conn, shop):
        with pytest.raises(RpcError, match="WRONG_ARGUMENT") as caught:
            await node.call(conn, f"shop.{command}", *parts)
        return str(caught.value)

    assert said in asyncio.run(with_shop(ask))


def test_reply_when_it_is_not_what_was_said_is_an_error_of_the_caller():
    class Wrong(Protocol):
        async def price(self, order: Order) -> Bill: ...
        def dishes(self, like: str) -> AsyncIterator[int]: ...

    async def ask(node, conn, shop):
        wrong = node.service(Wrong, conn, "shop")
        found = []
        for asked in (
            wrong.price(Order("soup")),
            anext(aiter(wrong.dishes("tea"))),
            node.call(conn, "shop.close", returns=str),
        ):
            with pytest.raises(RpcError) as caught:
                await asked
            found.append(caught.value.code)
        for given in (b"tea", 5):
            with pytest.raises(LocalProtocolError, match="it must be str"):
                await shop.picture(given)
        with pytest.raises(TypeError, match="missing a required argument: 'order'"):
            await wrong.price()
        return found

    assert asyncio.run(with_shop(ask)) == ["WRONG_REPLY"] * 3


class NoTypes(Protocol):
    async def price(self, order): ...


class Several(Protocol):
    async def price(self, order: Order, count: int) -> int: ...


class NoForm(Protocol):
    async def price(self, order: asyncio.Task) -> int: ...


class Nothing(Protocol):
    pass


class Static(Protocol):
    @staticmethod
    async def price(order: Order) -> int: ...


class Bare(Protocol):
    def dishes(self, like: str) -> AsyncIterator: ...


class Repository(Protocol[_T]):
    async def price(self, order: _T) -> int: ...


class Unhashable(Protocol):
    async def price(self, order: Literal[[1]]) -> int: ...


class Once(Protocol):
    async def dishes(self, like: str) -> Order: ...


class More(Protocol):
    async def wash(self) -> None: ...


@pytest.mark.parametrize(
    ("service", "said"),
    [
        (NoTypes, "NoTypes.price has no type for order"),
        (Several, "Several.price takes more than one value"),
        (NoForm, "has no form in JSON"),
        (Nothing, "has no methods"),
        (Static, "Static.price is a staticmethod"),
        (Bare, "Bare.dishes: ~T is of any type"),
        (Repository, "Repository.price: ~_T is of any type"),
        (Unhashable, "has no form in JSON"),
        (Once, "dishes must answer once"),
        (More, "Kitchen has no method wash"),
    ],
)
def test_service_when_it_cannot_be_one_says_so_at_once(service, said):
    node = RpcNode()
    node.add_category("shop")
    with pytest.raises(LocalProtocolError, match=said):
        node.add_service("shop", service, Kitchen())
    node.stop()


class Forms(Protocol):
    async def few(self, count: Annotated[int, Field(gt=0)] = 1) -> int: ...
    async def raw(self, data: bytes, /) -> bytes: ...
    def late(self, order: Order) -> int: ...


class Former:
    async def few(self, count):
        return count

    async def raw(self, data):
        return bytearray(data)

    def late(self, order):
        return self.few(order.count)  # a coroutine that nobody awaits


def test_methods_when_called_in_any_way_that_python_allows_are():
    async def run():
        server = RpcNode()
        server.add_category("a")
        server.add_service("a", Forms, Former())
        address = server.listen_plain("tcp://127.0.0.1:*")
        async with server, RpcNode() as node:
            forms = node.service(Forms, await node.connect(address), "a")
            assert [await forms.few(), await forms.few(2), await forms.few(count=3)] == [1, 2, 3]
            assert await forms.raw(memoryview(b"ab")) == b"ab"
            with pytest.raises(RpcError, match=r"WRONG_ARGUMENT.*greater than 0"):
                await forms.few(-5)
            with pytest.raises(RpcError, match="HANDLER_FAILED"):
                await forms.late(Order("tea"))

    asyncio.run(run())


def test_health_when_asked_says_what_the_application_says():
    async def ask(server, node, conn):
        async def health(*parts):
            return await node.call(conn, "rpc.health", *parts, returns=str)

        found = [await health(), await health("shop"), await health("other")]
        server.set_serving(serving=False, category="shop")
        found += [await health(), await health("shop")]
        server.set_serving(serving=True, category="shop")
        server.set_serving(serving=False)
        with pytest.raises(LocalProtocolError, match="was not added"):
            server.set_serving(serving=False, category="other")
        return [*found, await health(), await health("shop")]

    async def run():
        server = serving()
        address = server.listen_plain("tcp://127.0.0.1:*")
        async with server, RpcNode() as node:
            return await ask(server, node, await node.connect(address))

    assert asyncio.run(run()) == [
        *("SERVING", "SERVING", "SERVICE_UNKNOWN"),
        *("SERVING", "NOT_SERVING"),
        *("NOT_SERVING", "NOT_SERVING"),
    ]


class Scales(Protocol):
    async def weigh(self, orders: AsyncIterator[Order]) -> int: ...
    def label(self, orders: AsyncIterator[Order]) -> AsyncIterator[str]: ...


class Weighing:
    async def weigh(self, orders):
        return sum([order.count async for order in orders])

    async def label(self, orders):
        async for order in orders:
            yield f"{order.count} x {order.dish}"


async def with_scales(ask, *, pooled):
    server = RpcNode()
    server.add_category("scales")
    server.add_service("scales", Scales, Weighing())
    address = server.listen_plain("tcp://127.0.0.1:*")
    async with server, RpcNode() as node:
        conn = await node.connect(address)
        pool = node.pool(conn)
        try:
            stub = pool.service(Scales, "scales") if pooled else node.service(Scales, conn, "scales")
            return await ask(node, conn, stub)
        finally:
            pool.close()


async def orders(*items):
    for item in items:
        yield item


@pytest.mark.parametrize("pooled", [False, True])
def test_service_when_it_takes_many_values_is_streamed_them(pooled):
    async def ask(node, conn, scales):
        weight = await scales.weigh(orders(Order("soup", 2), Order("pie", 3)))
        labels = [label async for label in scales.label(orders(Order("soup", 2), Order("pie")))]
        return weight, labels, await scales.weigh(orders())

    found = asyncio.run(with_scales(ask, pooled=pooled))
    assert found == (5, ["2 x soup", "1 x pie"], 0)


def test_service_when_an_item_is_wrong_is_an_error_on_either_side():
    async def ask(node, conn, scales):
        with pytest.raises(LocalProtocolError, match="cannot be written as JSON"):
            await scales.weigh(orders(b"\xff"))
        with pytest.raises(RpcError, match="WRONG_ARGUMENT: an item of weigh"):
            await node.call(conn, "scales.weigh", items=orders('{"dish": 1}'))
        told = json.loads((await node.call(conn, "rpc.describe"))[0])
        return next(item["takes"] for item in told["commands"] if item["name"] == "scales.weigh")

    takes = asyncio.run(with_scales(ask, pooled=False))
    assert takes["parts"] == [0, 0]
    assert takes["items"]["json"]["required"] == ["dish"]


def test_service_when_a_plain_function_is_to_take_many_values_is_refused():
    class Plain(Weighing):
        def weigh(self, orders):
            return 1

    node = RpcNode()
    node.add_category("scales")
    with pytest.raises(LocalProtocolError, match="weigh must be a coroutine function, as it takes many values"):
        node.add_service("scales", Scales, Plain())
