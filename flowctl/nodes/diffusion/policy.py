"""How much may be on its way: all limits of object diffusion, by count and by octets, per peer and in total (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.nodes.diffusion.objects import MAX_U16

_MOST_BYTES: Final = 1 << 40
_COUNTS: Final = {
    "max_num_objects_outstanding": MAX_U16,
    "max_num_ids_req": MAX_U16,
    "max_num_objects_inflight_per_peer": MAX_U16,
    "max_num_objects_inflight_total": 1 << 24,
    "target_object_redundancy": 1000,
    "max_object_id_bytes": 1024,
    "max_object_size_bytes": _MOST_BYTES,
    "max_bytes_inflight_per_peer": _MOST_BYTES,
    "max_bytes_inflight_total": _MOST_BYTES,
}
"""Fields that must be 1 or more, with their maximum: counts must fit their field in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Limits of the inbound side."""

    #: ids announced and not acknowledged, with those asked for, per peer; 1 to 65535. The same at both ends.
    max_num_objects_outstanding: int = 100
    max_num_ids_req: int = 10
    max_num_objects_inflight_per_peer: int = 50
    #: objects asked for and not received, of all peers; 1 to 2^24. One that has waited beyond `inflight_timeout_s`
    #: counts for its peer only.
    max_num_objects_inflight_total: int = 500
    target_object_redundancy: int = 3  #: peers that one object is fetched from at the same time, 1 to 1000
    max_object_id_bytes: int = 64  #: octets of an id, 1 to 1024. Longer ones are an error of the peer.
    #: octets of an object, 1 to 2^40. Larger ones are an error of the peer. The default fits into the largest reply of
    #: the protocol. Where a peer announces no sizes, each of its objects counts as this.
    max_object_size_bytes: int = 2_000_000
    #: octets asked for, with those received and not yet in the pool, per peer; `max_object_size_bytes` or more
    max_bytes_inflight_per_peer: int = 16 << 20
    max_bytes_inflight_total: int = 256 << 20  #: the same of all peers; `max_object_size_bytes` or more
    #: time after which an object asked for is asked for elsewhere too, 0.001 or more. 0: never.
    inflight_timeout_s: float = 2.0
    #: objects that the fewest peers have are fetched first. False: those with the lowest ids.
    rarest_first: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be 1 to {most}")
        for name in ("max_bytes_inflight_per_peer", "max_bytes_inflight_total"):
            value = getattr(self, name)
            if value < self.max_object_size_bytes:
                raise ConfigError(
                    f"{name} is {value}, it must be max_object_size_bytes ({self.max_object_size_bytes}) or more: "
                    f"larger objects could never be fetched"
                )
        if not (self.inflight_timeout_s == 0 or self.inflight_timeout_s >= 0.001):
            raise ConfigError(
                f"inflight_timeout_s is {self.inflight_timeout_s}, it must be 0.001 or more, or 0 (never)"
            )

    def room_for(self, size_bytes: int | None) -> int:
        return self.max_object_size_bytes if size_bytes is None else size_bytes
