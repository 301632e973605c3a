"""A raw client of a server session, whose octets come whole, one at a time, and at random splits."""

import pytest
from rtmp_session_kit import SPLITS, ScriptedClient


@pytest.fixture(params=SPLITS, ids=lambda split: split.__name__)
def client(request):
    return ScriptedClient(split=request.param)
