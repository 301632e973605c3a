"""Bans while it happens."""
