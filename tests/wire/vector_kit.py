"""The recorded vectors beside the checkout, and the notation of values in them."""

import json
import math
from pathlib import Path

import pytest

from flowctl.wire.rtmp.amf.values import UNDEFINED, Date, EcmaArray, TypedObject, Xml

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "vectors"
RECORDED = [
    vector
    for name in ("rtmp_vectors.json", "rtmp_vectors_more.json", "rtmp_fuzz_seeds.json")
    if (VECTORS / name).exists()
    for vector in json.loads((VECTORS / name).read_text("utf-8"))["vectors"]
]


def vectors(*kinds, only=lambda _vector: True):
    """Return the recorded vectors of `kinds` as pytest parameters; one that skips visibly where there are none."""
    found = [vector for vector in RECORDED if vector["kind"] in kinds and only(vector)]
    absent = pytest.param(None, id="absent", marks=pytest.mark.skip(reason=f"no recorded vectors in {VECTORS}"))
    return [pytest.param(vector, id=f"{vector['id']}-{number}") for number, vector in enumerate(found)] or [absent]


def tagged(value, codec):
    """Return `value` in the notation of the vector files: JSON scalars, and objects tagged with "$"."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "double", "v": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bool | str | float) or value is None:
        return value
    if isinstance(value, int):
        return {"$": "int", "v": value}
    if value is UNDEFINED:
        return {"$": "undefined"}
    if isinstance(value, Date):
        return {"$": "date", "ms": value.ms} | ({"tz": value.tz} if codec == "amf0" else {})
    if isinstance(value, Xml):
        return {"$": "xml", "v": value.text}
    return tagged_container(value, codec)


def tagged_container(value, codec):
    """Return a container in the notation of the vector files."""

    def props(members):
        return [[name, tagged(item, codec)] for name, item in members.items()]

    if isinstance(value, EcmaArray):
        return {"$": "ecma", "count": value.count, "props": props(value)}
    if isinstance(value, TypedObject):
        return {"$": "typed", "class": value.class_name, "props": props(value.properties)}
    if isinstance(value, dict):
        return {"$": "object", "props": props(value)}
    if isinstance(value, list):
        return {"$": "strict", "items": [tagged(item, codec) for item in value]}
    raise AssertionError(f"no notation for {value!r}")
