"""Models: queries in files beside the code, in Spark's dialect of SQL, which both engines run.

Theory of operation. A model is one SELECT (``viewers/sessions.sql``); what it reads are its inputs, frames that it
names as if they were tables. Spark runs the text as it is. For DuckDB sqlglot parses it and writes it in the other
dialect; what means another thing there by the same name is a macro (`flowctl.analyze.duck.macros`). ``:name`` stands
for a value: a number, a text, or a list of these, which belongs in the brackets of ``IN``. `WORDS` are known to all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.records.telemetry.schema import VIEWING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BY_PEER: Final = (CloseReason.PEER_CLOSED.value, CloseReason.PEER_RESET.value)
"""Reasons of a close that was the peer's doing; all others are ours."""
WORDS: Final[Mapping[str, Any]] = {
    "slow_ends": SLOW_ENDS, "by_peer": BY_PEER, "viewing": VIEWING, "most": (1 << 63) - 1,
}  # fmt: skip
_HERE: Final = Path(__file__).parent
_VALUE: Final = re.compile(r"(^|[^:\w]):([a-z]\w*)")


def query(name: str, inputs: Mapping[str, DataFrame], **values: Any) -> DataFrame:
    """Return the rows of a model (its path in this folder, without ``.sql``), lazy, on the engine of its inputs."""
    return run_text(text_of(name), inputs, **values)


def run_text(text: str, inputs: Mapping[str, Any], **values: Any) -> DataFrame:
    """Return the rows of a query in Spark's dialect."""
    session = next(iter(inputs.values())).sparkSession
    known = {**WORDS, **values}
    text = _VALUE.sub(lambda found: found[1] + literal(known[found[2]]), text)
    if hasattr(session, "of_text"):
        return cast("DataFrame", session.of_text(text, inputs))
    # A frame in place of each name, not a WITH before all: to analyse one more level of a hundred columns takes longer.
    names = re.compile(rf"\b(FROM|JOIN)\s+({'|'.join(inputs)})\b")
    text = names.sub(r"\1 {\2} AS \2", text.replace("{", "{{").replace("}", "}}"))
    return cast("DataFrame", session.sql(text, None, **inputs))


@functools.cache
def text_of(name: str) -> str:
    """Return the text of a model, without comments: a colon or a brace in one means nothing."""
    return re.sub(r"--.*", "", (_HERE / f"{name}.sql").read_text("utf-8"))


def literal(value: Any) -> str:
    """Return a value as both dialects have it; floats with an exponent, for without one they are decimals."""
    match value:
        case None:
            return "NULL"
        case bool() | int():
            return str(value)
        case float():
            return f"{value!r}" if "e" in repr(value) else f"{value!r}e0"
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        case _:
            return ", ".join(map(literal, value)) or "NULL"
