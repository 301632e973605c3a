"""The profiles of load tests, listed: for ``flowctl load --list-profiles`` (pure)."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any, Final

from flowctl.load.profiles import profiles
from flowctl.load.results.result import PeerKind

_TITLES: Final = {
    PeerKind.HEALTHY: "Healthy viewers",
    PeerKind.SLOW: "Slow viewers",
    PeerKind.HOSTILE: "Hostile peers",
}
_WIDTH: Final = 100


def as_dicts() -> list[dict[str, Any]]:
    return [
        {
            "name": profile.name,
            "alias": profile.alias or None,
            "kind": profile.kind.value,
            "usage": profile.usage,
            "example": profile.example or profile.name,
            "summary": profile.summary,
            "explanation": profile.explanation,
            "expectation": profile.expectation,
        }
        for profile in sorted(profiles().values(), key=lambda item: list(_TITLES).index(item.kind))
    ]


def as_lines() -> list[str]:
    found: list[str] = []
    for kind, group in itertools.groupby(as_dicts(), key=lambda profile: PeerKind(profile["kind"])):
        found += [_TITLES[kind], ""]
        for profile in group:
            alias = f", or {profile['alias']}" if profile["alias"] else ""
            found.append(f"  {profile['usage']}{alias}: {profile['summary']}")
            for text in (profile["explanation"], f"a sound server: {profile['expectation']}"):
                found += textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            found += [f"      for example --profile {profile['example']}", ""]
    return found[:-1]
