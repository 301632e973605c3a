"""Whose names of streams are: scripts of claims and releases, and what became of each."""

from __future__ import annotations

import re

import pytest

from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import SecondPublisher
from flowctl.live.namebook import ClaimVerdict, NameBook, NameRules, Owner

ANN, BOB = Owner("192.0.2.1"), Owner("192.0.2.2")
OWNERS = {"ann": ANN, "bob": BOB}
GRACE_S = 3.0


class Script:
    """Runs steps like ``claim 1 ann`` on a book: each line is a step, ``=>``, and what comes of it."""

    def __init__(self, policy: str) -> None:
        rules = NameRules(SecondPublisher(policy), GRACE_S, 2)
        self.book: NameBook[str] = NameBook(lambda _: rules)
        self.now = 0.0

    def run(self, script: str) -> None:
        for line in filter(None, map(str.strip, script.splitlines())):
            step, _, expected = line.partition("=>")
            assert self.step(*step.split()) == expected.strip(), line

    def step(self, verb, *words) -> str:
        match verb:
            case "claim" | "silent?" | "decided":
                return self.claim(verb, *words)
            case "breaks" | "ends":
                holder, name = words[0], words[1] if len(words) > 1 else "live/a"
                freed = self.book.release(name, holder, self.now, grace=verb == "breaks")
                if freed is None:
                    return "nothing"
                return freed.following or (f"kept {freed.kept_s:g}" if freed.kept_s else "free")
            case "promote":
                return str(self.book.promote("live/a", words[0]))
            case "after":
                self.now += float(words[0])
                due = self.book.names_due(self.now)
                for name in due:
                    self.book.free_name(name)
                return " ".join(due)
        raise AssertionError(verb)

    def claim(self, verb, holder, owner, last=None) -> str:
        """Claim a name: of one that sends, one whose silence has to be asked about, or as was decided elsewhere."""
        decided = ClaimVerdict(last.replace("-", " ")) if verb == "decided" else None
        name = "live/a" if last is None or decided else last
        silent = None if verb == "silent?" else False
        try:
            verdict, rival = self.book.claim(name, holder, OWNERS[owner], silent=silent, decided=decided)
        except LimitExceededError as error:
            return error.limit
        except BusyError as error:
            return "kept" if "kept" in str(error) else "taken"
        return " ".join(filter(None, [verdict.value, rival]))


SCRIPTS = {
    "refuse": """
        claim 1 ann => granted
        claim 2 bob => taken
        claim 3 ann => taken
        claim 1 ann => taken""",
    "replace": """
        claim 1 ann => granted
        claim 2 bob => granted 1
        breaks 1 => nothing
        ends 2 => free""",
    "standby in order": """
        claim 1 ann => granted
        claim 2 bob => stands by
        claim 3 bob => stands by
        claim 2 bob => taken
        ends 2 => nothing
        breaks 1 => 3
        ends 3 => free""",
    "standby, promoted": """
        claim 1 ann => granted
        claim 2 bob => stands by
        promote 2 => 1
        ends 1 => nothing
        ends 2 => free""",
    "refuse, kept for its owner": """
        claim 1 ann => granted
        breaks 1 => kept 3
        claim 2 bob => kept
        after 2.9 =>
        claim 3 ann => granted
        after 9 =>
        claim 2 bob => taken
        ends 3 => free""",
    "refuse, and its owner stays away": """
        claim 1 ann => granted
        breaks 1 => kept 3
        after 3 => live/a
        claim 2 bob => granted""",
    "replace, and kept for nobody else": """
        claim 1 ann => granted
        breaks 1 => kept 3
        claim 2 bob => granted""",
    "refuse, and silence is asked about": """
        claim 1 ann => granted
        silent? 2 ann => ask 1
        silent? 2 bob => taken""",
    "replace, two of an address": """
        claim 1 ann => granted
        claim 2 ann live/b => granted
        claim 3 ann live/c => publishers_per_address
        claim 3 ann => granted 1
        ends 3 => free
        claim 3 ann live/c => granted""",
    "refuse, two are kept for an address": """
        claim 1 ann => granted
        breaks 1 => kept 3
        claim 2 ann live/b => granted
        breaks 2 live/b => kept 3
        claim 3 ann live/c => granted
        breaks 3 live/c => free
        claim 4 bob => kept
        after 3 => live/a live/b
        claim 3 ann live/c => granted
        breaks 3 live/c => kept 3""",
    "refuse, but decided elsewhere": """
        claim 1 ann => granted
        decided 2 bob granted => granted 1
        decided 3 ann stands-by => stands by""",
}
"""By the policy, and what is shown; an address may have two names."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_book_when_publishers_come_and_go_decides_by_its_rules(name):
    Script(re.split(r"\W", name)[0]).run(SCRIPTS[name])


def test_standbys_when_too_many_are_refused():
    """Each of them is a connection whose media is read for nothing."""
    book: NameBook[int] = NameBook(lambda _: NameRules(SecondPublisher.STANDBY, GRACE_S, 0))
    for number in range(9):
        book.claim("live/a", number, ANN, silent=False)
    with pytest.raises(LimitExceededError, match="standby_publishers is 9, the limit is 8"):
        book.claim("live/a", 9, ANN, silent=False)


@pytest.mark.parametrize("policy", [item.value for item in SecondPublisher])
def test_book_when_all_have_left_is_empty(policy):
    script = Script(policy)
    for step in ("claim 1 ann", "claim 2 bob", "breaks 1", "claim 3 ann", "breaks 2", "breaks 3", "after 9"):
        script.step(*step.split())
    book = script.book
    assert (book.entries, book._published_from, book._kept_for, book._kept) == ({}, {}, {}, {})


def test_names_when_kept_for_different_times_are_due_in_order():
    rules = {
        "live/long": NameRules(SecondPublisher.REFUSE, 9.0, 8),
        "live/short": NameRules(SecondPublisher.REFUSE, 1.0, 8),
    }
    book: NameBook[str] = NameBook(rules.__getitem__)
    for name in rules:
        book.claim(name, "1", ANN)
        book.release(name, "1", 0.0, grace=True)
    assert (book.next_deadline(), book.names_due(0.9), book.names_due(1.0)) == (1.0, [], ["live/short"])
    book.free_name("live/short")
    assert (book.next_deadline(), book.is_kept("live/long")) == (9.0, True)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Owner("192.0.2.1"), Owner("192.0.2.1"), True),
        (Owner("192.0.2.1"), Owner("192.0.2.2"), False),
        (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2", key=b"k"), True),
        (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2", key=b"l"), False),
        (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2"), False),
        (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.1"), False),
        (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.1", key=b"l"), False),
        (Owner("192.0.2.1"), Owner("192.0.2.1", key=b"k"), True),
        (Owner("192.0.2.1", "anna"), Owner("192.0.2.2", "anna"), True),
        (Owner("192.0.2.1", "anna", b"k"), Owner("192.0.2.1", "berta", b"k"), False),
        (Owner("192.0.2.1"), Owner("192.0.2.1", "berta"), False),
    ],
)
def test_owner_when_back_is_known_by_user_else_by_key_or_address(first, second, same):
    assert first.is_same(second) is same


def test_owner_when_made_of_a_query_keeps_no_secret():
    owner = Owner.of("192.0.2.1", None, {"key": "canary", "name": "x"})
    assert "canary" not in repr(owner)
    assert owner.key == Owner.of("192.0.2.2", None, {"name": "y", "key": "canary"}).key != b""
    assert Owner.of("192.0.2.1", None, {"name": "x", "key": ""}).key == b""
