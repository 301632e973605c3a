"""What the tests of both AMF readers share."""

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import DEFAULT_LIMITS, AmfLimits
from flowctl.wire.rtmp.amf.values import simplify


def code_of(codec, data, limits=DEFAULT_LIMITS):
    """Return the code of what `data` is refused with; None: it is decoded."""
    try:
        codec.decode(data, limits)
    except RemoteProtocolError as error:
        return error.code
    return None


def check_any(codec, octets):
    """Whatever arrives, nothing but RemoteProtocolError comes out, and what decodes can be sent on as AMF0."""
    try:
        values = [simplify(value) for value in codec.decode(octets)]
    except RemoteProtocolError:
        return
    sent = amf0.encode(*values)
    again = amf0.decode(sent, AmfLimits(nodes=1 << 20))
    assert len(again) == len(values)
    assert amf0.encode(*again) == sent
