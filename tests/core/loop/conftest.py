"""Fixtures of the tests of poll groups."""

from pollgroup_kit import errors, factory, group, make_group

__all__ = ["errors", "factory", "group", "make_group"]
