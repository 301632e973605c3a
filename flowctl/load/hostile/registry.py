"""All hostile profiles, by id and by name, and those of the list that no client can carry out against an RTMP port."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flowctl.errors import ConfigError
from flowctl.load.hostile.attacks import amf, chunk, control, http, publisher, reader, session, work
from flowctl.load.hostile.base import HostileProfile

HOSTILE_PROFILES: Final[tuple[HostileProfile, ...]] = tuple(
    sorted(
        (
            *chunk.PROFILES,
            *amf.PROFILES,
            *session.PROFILES,
            *reader.PROFILES,
            *publisher.PROFILES,
            *control.PROFILES,
            *work.PROFILES,
            *http.PROFILES,
        ),
        key=lambda profile: profile.id,
    )
)
"""Every attack, in the order of its id."""

NOT_POSSIBLE: Final = MappingProxyType(
    {
        "B27": "script in a callback parameter of an admin API, reserved routes: an RTMP port has no such thing",
        "B34": "half-closed HTTP-FLV readers, chunked bodies: an RTMP port has no HTTP; over HTTP they are the "
        "profiles H01 and H02, half-closed readers of RTMP are the profile half-close",
    }
)
"""Attacks that cannot be carried out over RTMP, with the reason."""

_BY_NAME: Final = {key: profile for profile in HOSTILE_PROFILES for key in (profile.id, profile.name)}


def hostile_profile(name: str) -> HostileProfile:
    """Return the profile with this id (``B04``, in any case) or this readable name."""
    profile = _BY_NAME.get(name) or _BY_NAME.get(name.upper())
    if profile is not None:
        return profile
    reason = NOT_POSSIBLE.get(name.upper())
    if reason is not None:
        raise ConfigError(f"profile {name.upper()} cannot be carried out: {reason}")
    raise ConfigError(f"there is no hostile profile {name!r}", hint="flowctl load --list-profiles shows them all")
