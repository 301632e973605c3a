"""Logins: how passwords are kept, compared and tried; hashes are cheap here, so that the rules are what is tested."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from flowctl.errors import ConfigError
from flowctl.nodes.rpc.access import logins as module
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.access.logins import (
    BURST_PER_ADDRESS,
    DEFAULT_COST,
    MOST_PASSWORD_BYTES,
    MOST_WAITING,
    MOST_WAITING_PER_ADDRESS,
    TRIES_PER_ADDRESS_AND_S,
    TRIES_PER_CONNECTION,
    HashCost,
    LoginDesk,
    Logins,
    LoginTries,
    PasswordHash,
)
from flowctl.pollgroup import PollGroup

WAIT_S = 20.0
CHEAP = HashCost(log_n=1, r=1, p=1)
PASSWORD = "correct horse battery staple"


def users() -> Logins:
    logins = Logins()
    logins.add("ada", PasswordHash.of(PASSWORD, CHEAP), AuthLevel.ADMIN)
    logins.add("bob", PasswordHash.of("bob's", CHEAP), AuthLevel.BASIC)
    return logins


@pytest.mark.parametrize(
    ("user", "password", "level"),
    [
        *((b"ada", PASSWORD.encode(), AuthLevel.ADMIN), (b"bob", b"bob's", AuthLevel.BASIC), (b"ada", b"bob's", None)),
        *((b"ada", b"", None), (b"", b"", None), (b"eve", PASSWORD.encode(), None), (b"\xff\0", b"\xff\0", None)),
        *((b"ADA", PASSWORD.encode(), None), (b"ada", PASSWORD.encode() + b"\0", None), (b"a" * 200, b"x", None)),
        (b"ada", b"x" * (MOST_PASSWORD_BYTES + 1), None),
    ],
)
def test_login_when_checked_gives_the_level_of_the_user_or_nothing(user, password, level):
    """Name and password have to be right to the octet; whatever else comes gives nothing (OX-83)."""
    assert level == users().level_of(user, password)


def test_login_when_the_user_is_unknown_costs_the_same(monkeypatch):
    logins, computed = users(), []
    real = HashCost.hash

    def counted(self: HashCost, password: bytes, salt: bytes) -> bytes:
        computed.append(self)
        return real(self, password, salt)

    monkeypatch.setattr(HashCost, "hash", counted)
    tries = [(b"ada", b"x"), (b"eve", b"x"), (b"ada", PASSWORD.encode()), (b"e" * 999, b"x"), (b"ada", b"x" * 9999)]
    for user, password in tries:
        logins.level_of(user, password)
    assert [CHEAP] * len(tries) == computed


def test_login_when_there_are_no_users_gives_nothing():
    assert Logins().level_of(b"", b"") is None


def test_password_when_stored_is_salted_and_read_again():
    first, second = (PasswordHash.of(PASSWORD, CHEAP) for _ in range(2))
    assert first.text() != second.text()
    assert first == PasswordHash.parse(first.text()) == pickle.loads(pickle.dumps(first))
    assert first.matches(PASSWORD.encode())
    assert not first.matches(PASSWORD.encode()[:-1])


def test_password_when_stored_by_default_costs_what_is_stated():
    assert PasswordHash.of("x").text().startswith("$scrypt$ln=14,r=8,p=5$")
    assert HashCost(log_n=14, r=8, p=5) == DEFAULT_COST


def test_password_when_shown_is_hidden():
    stored = PasswordHash.of(PASSWORD, CHEAP)
    shown = repr([stored]) + repr(users())
    with pytest.raises(ConfigError) as caught:
        PasswordHash.parse(stored.text() + PASSWORD)
    shown += str(caught.value) + str(caught.value.hint)
    with pytest.raises(ConfigError) as caught:
        PasswordHash.of("secret" * MOST_PASSWORD_BYTES, CHEAP)
    shown += str(caught.value)
    for secret in (PASSWORD, stored.text()[-43:], stored.text()[-66:-44], "secret"):
        assert secret not in shown


REST = "$" + "A" * 22 + "$" + "A" * 43
COSTS = ("ln=99,r=8,p=5", "ln=20,r=32,p=1", "ln=0,r=8,p=5")


@pytest.mark.parametrize(
    "text",
    [
        *(f"$scrypt${cost}{REST}" for cost in COSTS),
        *("", "password", f"$scrypt$ln=14,r=8,p=5{REST}\n", "$argon2id$v=19$m=65536,t=3,p=4$c2FsdA$aGFzaA"),
    ],
)
def test_password_when_its_text_is_of_another_form_or_cost_is_refused(text):
    with pytest.raises(ConfigError):
        PasswordHash.parse(text)


@pytest.mark.parametrize(
    ("user", "cost", "level", "match"),
    [
        *(("ada", CHEAP, AuthLevel.BASIC, "before"), ("", CHEAP, AuthLevel.BASIC, "0 bytes")),
        *(("a" * 129, CHEAP, AuthLevel.BASIC, "129 bytes"), ("c", CHEAP, AuthLevel.NONE, "BASIC or AuthLevel.ADMIN")),
        ("c", HashCost(log_n=2, r=1, p=1), AuthLevel.BASIC, "another cost"),
    ],
)
def test_user_when_it_cannot_be_added_is_an_error(user, cost, level, match):
    with pytest.raises(ConfigError, match=match):
        users().add(user, PasswordHash.of("x", cost), level)


def test_tries_when_a_connection_fails_again_and_again_are_refused_unheard():
    tries = LoginTries()
    for _ in range(TRIES_PER_CONNECTION):
        assert tries.begin(1, "10.0.0.1", 0.0)
        tries.end(1, "10.0.0.1", right=False)
    assert not tries.begin(1, "10.0.0.1", 1e9)
    assert tries.begin(2, "10.0.0.1", 0.0)


def test_tries_when_many_of_a_connection_wait_at_once_are_no_more_than_one_after_the_other():
    tries = LoginTries()
    assert [tries.begin(1, "a", 0.0) for _ in range(7)] == [True] * TRIES_PER_CONNECTION + [False] * 2
    for right in (False, False, False, False, True):
        tries.end(1, "a", right=right)
    assert tries.begin(1, "a", 0.0)


def test_tries_when_an_address_dials_for_each_are_bounded_by_its_rate():
    tries, connections = LoginTries(), iter(range(10_000))

    def attempt(address: str, now: float) -> bool:
        number = next(connections)
        begun = tries.begin(number, address, now)
        if begun:
            tries.end(number, address, right=False)
        return begun

    assert [attempt("::1", 0.0) for _ in range(BURST_PER_ADDRESS + 3)] == [True] * BURST_PER_ADDRESS + [False] * 3
    assert attempt("10.0.0.1", 0.0)
    assert [attempt("::1", 1 / TRIES_PER_ADDRESS_AND_S) for _ in range(2)] == [True, False]


def test_tries_when_many_wait_leave_places_to_other_addresses():
    tries, begun = LoginTries(), []
    for address in "abcdefgh":
        for number in range(MOST_WAITING_PER_ADDRESS + 1):
            connection = 100 * ord(address) + number
            if tries.begin(connection, address, 0.0):
                begun += [(connection, address)]
    assert (len(begun), tries.waiting_count) == (MOST_WAITING, MOST_WAITING)
    assert [address for _, address in begun] == sorted("abcd" * MOST_WAITING_PER_ADDRESS)
    for number, address in begun:
        tries.end(number, address, right=True)
    assert (tries.waiting_count, tries._waiting, len(tries._failed)) == (0, {}, 0)


@pytest.fixture
def group(loop_factory) -> Iterator[PollGroup]:
    group = PollGroup("logins", loop_factory=loop_factory, on_error=lambda where, error: None)
    group.start()
    yield group
    group.stop()


def test_desk_when_asked_checks_on_a_thread_of_its_own_and_tells_on_the_loops(group, monkeypatch):
    threads: list[int] = []
    real = Logins.level_of

    def level_of(self: Logins, user: bytes, password: bytes) -> AuthLevel | None:
        threads.append(threading.get_ident())
        if user == b"breaks":
            raise MemoryError
        return real(self, user, password)

    monkeypatch.setattr(module.Logins, "level_of", level_of)
    desk = LoginDesk(group, users())
    answers: list[Future] = [Future() for _ in range(3)]
    logins = [(b"ada", PASSWORD.encode()), (b"breaks", b""), (b"bob", b"wrong")]

    def ask() -> None:
        for (user, password), answer in zip(logins, answers, strict=True):
            desk.login(1, "a", user, password, lambda level, to=answer: to.set_result((level, group.in_thread())))

    group.call_soon(ask)
    assert [answer.result(WAIT_S) for answer in answers] == [(AuthLevel.ADMIN, True), (None, True), (None, True)]
    assert len(set(threads)) == 1
    assert threads[0] not in (group.thread_id, threading.get_ident())
    desk.close()
