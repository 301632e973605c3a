"""One Spark session for all tests of the pipeline: starting Java costs seconds, so it is shared."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from flowctl.analyze.engine import DUCKDB, SPARK, using
from flowctl.errors import ConfigError


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """Give a session with two cores and two shuffle partitions; skips where PySpark or Java is missing."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not installed: pip install '.[pipeline]'")
    from flowctl.analyze.spark.session import SessionOptions, open_session

    folder = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.default.parallelism": "2",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
    }
    options = SessionOptions(master="local[2]", conf=conf, log_file=folder / "spark.log")
    try:
        session = open_session(options)
    except ConfigError as error:
        pytest.skip(f"{error}; {error.hint}")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def engine_of_test(request):
    """See to it that a test of Spark alone is not run by the engine of the test before it."""
    alone = "either" not in request.fixturenames
    with using(SPARK) if alone else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module", params=[SPARK, DUCKDB])
def either(request):
    """Give a session of each engine in turn, which is the one that runs: what jobs make is the same on both."""
    with using(request.param):
        if request.param == SPARK:
            yield request.getfixturevalue("spark")
        else:
            from flowctl.analyze.duck.session import session

            with session() as database:
                yield database
