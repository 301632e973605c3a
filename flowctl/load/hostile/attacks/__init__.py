"""All hostile profiles by id, and those of the list that no client can carry out against an RTMP port.

Begin with `chunk.py`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flowctl.load.hostile.attacks import amf, chunk, control, http, publisher, session, work

HOSTILE: Final = MappingProxyType(
    {
        profile.name: profile
        for profile in sorted(
            (
                *chunk.PROFILES,
                *amf.PROFILES,
                *session.PROFILES,
                *publisher.PROFILES,
                *control.PROFILES,
                *work.PROFILES,
                *http.PROFILES,
            ),
            key=lambda profile: profile.name,
        )
    }
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
