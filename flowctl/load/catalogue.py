"""The profiles of load tests, listed: for ``flowctl load --list-profiles`` and for the documents (pure)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any, Final

from flowctl.load.profiles import Profile, profiles
from flowctl.load.results.result import PeerKind

_TITLES: Final = {
    PeerKind.HEALTHY: "Healthy viewers",
    PeerKind.SLOW: "Slow viewers",
    PeerKind.HOSTILE: "Hostile peers",
}
_WIDTH: Final = 100


def by_kind() -> list[tuple[str, list[Profile]]]:
    """Return the profiles by kind, with a title for each: healthy, slow, hostile."""
    listed = list(profiles().values())
    groups = [(title, [profile for profile in listed if profile.kind is kind]) for kind, title in _TITLES.items()]
    return [(title, group) for title, group in groups if group]


def usage(profile: Profile) -> str:
    """Return how a profile is written, with the names of its parameters."""
    if not profile.parameters:
        return profile.name
    if profile.parameters.startswith("["):
        return f"{profile.name}[@{profile.parameters[1:]}"
    return f"{profile.name}@{profile.parameters}"


def as_dicts() -> list[dict[str, Any]]:
    """Return all profiles as plain values, for JSON."""
    return [
        {
            "name": profile.name,
            "alias": profile.alias or None,
            "kind": profile.kind.value,
            "usage": usage(profile),
            "example": profile.example or profile.name,
            "summary": profile.summary,
            "explanation": profile.explanation,
            "expectation": profile.expectation,
        }
        for _, group in by_kind()
        for profile in group
    ]


def as_lines() -> list[str]:
    """Return all profiles with their explanations, for people."""
    found: list[str] = []
    for title, group in by_kind():
        found += [title, ""]
        for profile in group:
            found += [*_lines(profile), ""]
    return found[:-1]


def _lines(profile: Profile) -> Iterable[str]:
    alias = f", or {profile.alias}" if profile.alias else ""
    yield f"  {usage(profile)}{alias}: {profile.summary}"
    for label, text in (("", profile.explanation), ("a sound server: ", profile.expectation)):
        if text:
            yield from textwrap.wrap(label + text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    if profile.example:
        yield f"      for example --profile {profile.example}"


def as_rows() -> list[list[str]]:
    """Return the healthy and slow profiles as rows: how it is written, what it does, what a sound server does."""
    return [
        [f"`{usage(profile)}`", profile.explanation, profile.expectation]
        for _, group in by_kind()
        for profile in group
        if profile.kind is not PeerKind.HOSTILE
    ]


def hostile_rows() -> list[list[str]]:
    """Return the hostile profiles as rows: id, readable name, what it does."""
    return [
        [f"`{profile.name}`", f"`{profile.alias}`", profile.summary]
        for _, group in by_kind()
        for profile in group
        if profile.kind is PeerKind.HOSTILE
    ]
