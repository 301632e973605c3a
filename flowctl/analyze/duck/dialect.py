"""Spark's SQL written as DuckDB's, by sqlglot.

sqlglot knows both dialects. Functions that mean another thing here, or that it does not know, are macros (`MACROS`):
they are left as calls. Its casts become null where a value does not fit, those of Spark fail, and of a number with a
fraction Spark's take the whole part.
"""

from __future__ import annotations

import functools
from typing import Any, Final, cast

from sqlglot import exp
from sqlglot.dialects.spark import Spark

from flowctl.analyze.duck.macros import MACROS

_CASTS: Final = {"BIGINT": "bigint", "DOUBLE": "double"}
_WHOLE: Final[dict[type, str]] = {exp.Floor: "floor", exp.Ceil: "ceil"}


class _Spark(Spark):
    """Spark's dialect, in which functions that are macros are not understood."""

    class Parser(Spark.Parser):  # type: ignore[misc,valid-type]  # made by a metaclass
        """Reads it."""

        FUNCTIONS = {name: of for name, of in Spark.Parser.FUNCTIONS.items() if name.lower() not in MACROS}  # noqa: RUF012 - as its class has it


@functools.lru_cache(maxsize=256)
def translated(text: str) -> str:
    """Return a query of Spark as one of DuckDB."""
    (tree,) = cast(list[Any], _Spark().parse(text))
    for node in [*tree.walk(bfs=False)]:
        if isinstance(node, exp.Select):
            node.set("hint", None)  # where rows go on a cluster
        elif isinstance(node, exp.Anonymous) and (name := node.name.lower()) in MACROS:
            of_texts = name == "concat_ws" and len(node.expressions) != 2  # not of a list: as it is here
            node.set("this", name if of_texts else f"spark_{name}")
        elif isinstance(node, exp.RegexpReplace):
            node.args["replacement"].set("this", node.args["replacement"].name.replace("$", "\\"))
        elif isinstance(node, exp.Div):
            node.set("safe", False)  # else it asks of each divisor whether it is 0
        elif macro := _macro(node):
            node.replace(exp.Anonymous(this=f"spark_{macro}", expressions=[node.this]))
    return cast(str, tree.sql("duckdb"))


def _macro(node: Any) -> str | None:
    if isinstance(node, (exp.Cast, exp.TryCast)):
        return _CASTS.get(node.to.sql())
    return _WHOLE.get(type(node))
