"""What tests of live share: a live server without sockets."""

from __future__ import annotations

import pytest
from live_kit import World


@pytest.fixture
def world():
    """Return a live server without sockets, whose handlers raise nothing."""
    world = World()
    yield world
    assert world.group.failures == []
