"""The scheduler's warnings are seen whatever level of the root logger an earlier test has left."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_logged():
    logger = logging.getLogger("flowctl.scheduler")
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(logging.NOTSET)
