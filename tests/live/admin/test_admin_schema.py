"""The API against its own description: whatever a client sends, the answer is one that the description names."""

from __future__ import annotations

import contextlib

import pytest
from e2e_kit import Clients, open_live_server, wait_for_viewers
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from loopback_kit import loopback

from flowctl.control.operations import OPERATIONS
from flowctl.live.admin.listener import admin_of
from flowctl.wire.media.synthetic import SyntheticSource

NEVER = {"/api/v1/events", "/api/v1/drain"}
"""One goes on for ever, the other ends the server that is asked."""
EXAMPLES = 8


@pytest.fixture(scope="module")
def described():
    """Return the description of a server that has a stream with a viewer."""
    import schemathesis

    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(Clients())
        server = stack.enter_context(open_live_server(admin=loopback()))
        listener = admin_of(server)
        listener.start()
        stack.callback(listener.stop, 5.0)
        clients.publish(server, SyntheticSource())
        clients.play(server)
        wait_for_viewers(server, 1)
        yield schemathesis.openapi.from_url(f"{listener.bound[0]}openapi.json")


def test_description_when_read_has_each_operation_with_its_arguments(described):
    paths = described.raw_schema["paths"]
    for operation in OPERATIONS:
        if operation.name == "metrics":
            continue  # Prometheus has a place for it
        found = paths[f"/api/v1/{operation.name}"]["get" if operation.looks else "post"]
        if operation.looks and operation.name != "events":
            named = {item["name"] for item in found["parameters"]}
        elif not operation.looks:
            named = set(found["requestBody"]["content"]["application/json"]["schema"]["properties"])
        else:
            named = set()
        assert named >= {item.name for item in operation.arguments if operation.name != "events"}


def test_api_when_fed_with_anything_answers_as_described(described):
    """No call fails the server, and each answer has a status, a type and a body that the description has for it."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    tried = 0
    for found in described.get_all_operations():
        operation = found.ok()
        if operation.path in NEVER:
            continue

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case):
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=wanted, timeout=20)

        call()
    assert tried > EXAMPLES * 5
