"""Results as tables of Spark's catalog, for queries that name them: ``--tables DATABASE``.

A table is external: it names the folder of a result, and holds nothing itself. One of that name over another folder is
somebody else's, and an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowctl.analyze.records.place import resolved
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession, database: str, outputs: Mapping[str, str]) -> list[str]:
    """Create or refresh a table for each result that is one; return their names."""
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {_quoted(database)}")
    tables = {name: resolved(path) for name, path in outputs.items() if "." not in name}
    for name, path in tables.items():
        table = f"{_quoted(database)}.{_quoted(name)}"
        if spark.catalog.tableExists(table):
            told = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").where("col_name = 'Location'").collect()
            place = str(told[0]["data_type"] if told else "no folder")
            place = place.removeprefix("file://").removeprefix("file:").rstrip("/")
            if place != path.removeprefix("file://").rstrip("/"):
                hint = "name another database with --tables"
                raise ConfigError(f"{database}.{name} is a table already, of {place}", hint=hint)
            spark.sql(f"DROP TABLE {table}")  # its columns may be others by now; the files stay
        spark.sql(f"CREATE TABLE {table} USING parquet LOCATION '{_escaped(path)}'")
    return [f"{database}.{name}" for name in tables]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("'", r"\'")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
