"""Fixtures of the tests of connections."""

from connection_kit import failures, groups, link

__all__ = ["failures", "groups", "link"]
