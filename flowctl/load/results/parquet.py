"""A load run as a Parquet file: one row per connection, one column per field of `PeerResult`, the run as metadata.

Columns, types and their order follow `PeerResult`: int64, float64, bool and string; what may be None is nullable, what
is a dictionary is a string of JSON. The metadata of the file has keys that begin with ``flowctl.``: see `metadata_of`.
Needs pyarrow, of the extra ``telemetry``.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.core.text.extras import require_extra
from flowctl.core.text.files import replacing
from flowctl.errors import InternalError
from flowctl.load.results.result import PeerResult, RunResult

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = 1
"""Version of the columns: it grows when one goes or changes its meaning, and not for new ones."""

_ROWS_PER_GROUP: Final = 20_000
"""Rows turned into columns at a time: bounds the memory that a long run with churn needs beside its rows."""


def column_types() -> dict[str, tuple[str, bool]]:
    """Return the type (``int64``, ``double``, ``bool``, ``string``) of each column and whether it may be null."""
    hints = typing.get_type_hints(PeerResult)
    return {item.name: _column(hints[item.name]) for item in dataclasses.fields(PeerResult)}


def _column(hint: Any) -> tuple[str, bool]:
    if isinstance(hint, types.UnionType):
        (inner,) = (part for part in hint.__args__ if part is not types.NoneType)
        return _column(inner)[0], True
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "string", False
    names = {int: "int64", float: "double", bool: "bool", str: "string", dict[str, float]: "string"}
    if hint not in names:
        raise InternalError(f"there is no column type for {hint}")
    return names[hint], False


def metadata_of(result: RunResult) -> dict[str, str]:
    try:
        version = importlib.metadata.version("flowctl")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "flowctl.format": str(FORMAT),
        "flowctl.version": version,
        "flowctl.url": result.url,
        "flowctl.command": result.command,
        "flowctl.began_at": result.began_at,
        "flowctl.duration_s": repr(result.duration_s),
        "flowctl.interrupted": json.dumps(result.interrupted),
        "flowctl.failure": result.failure,
        "flowctl.profiles": json.dumps(result.profiles),
        "flowctl.warnings": json.dumps(result.warnings),
    }


def schema_of(metadata: Mapping[str, str]) -> pa.Schema:
    import pyarrow as pa

    fields = [
        pa.field(name, pa.type_for_alias(kind), nullable=nullable) for name, (kind, nullable) in column_types().items()
    ]
    return pa.schema(fields, metadata=dict(metadata))


def write_parquet(path: Path, result: RunResult) -> None:
    require_extra("telemetry", "--parquet", "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    schema = schema_of(metadata_of(result))
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for first in range(0, len(result.peers), _ROWS_PER_GROUP):
            peers = result.peers[first : first + _ROWS_PER_GROUP]
            rows = [{**peer.as_dict(), "renditions_s": json.dumps(peer.renditions_s)} for peer in peers]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
