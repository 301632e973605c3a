"""A live server with an HTTP listener for each test."""

from __future__ import annotations

import pytest
from http_kit import Web


@pytest.fixture
def web(loop_factory):
    """Make servers with an HTTP listener; arguments as of `Web`."""
    made = []

    def make(**options):
        made.append(Web(loop_factory, **options))
        return made[-1]

    yield make
    for item in made:
        item.stop()


@pytest.fixture(scope="module")
def web_of_module():
    made = Web(None, players_may_wait=False)
    yield made
    made.stop()
