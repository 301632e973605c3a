"""``make setup-pipeline``: finds Java, or installs it where it may, or says exactly what to do.

Spark needs a Java that PyPI cannot give. As root beside apt-get Debian's package is installed, without the parts for
screens; elsewhere nothing is changed. Then the archive of Java's classes is made, see `java`. A second run
finds both, and changes nothing. With the path of a file as argument it is the process that makes the archive.

Exit status: 0 the pipeline can run, with an archive or without; 1 it cannot, and the last lines say why and what to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from flowctl.analyze.engine import SPARK, check_available
from flowctl.analyze.spark.java import PACKAGE, Java, archive_path, find_java, make_archive
from flowctl.analyze.spark.session import SessionOptions, session
from flowctl.core.text.output import say
from flowctl.errors import ConfigError, FlowctlError

_APT: Final = ("apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")
_UPDATE_TIMEOUT_S: Final = 120
"""Lists of packages are some MB; a mirror that takes longer is one that is away."""


def may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install() -> Java:
    """Install Debian's Java, without a time limit: a package manager that is killed leaves half of a package."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(  # noqa: S603 - fixed words
            [*_APT, "update"], env=environment, capture_output=True, timeout=_UPDATE_TIMEOUT_S, check=False
        )
    command = [*_APT, "install", "--yes", "--no-install-recommends", PACKAGE]
    done = subprocess.run(  # noqa: S603 - fixed words
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
        hint = f"install {PACKAGE}, or any newer Java, by hand"
        raise ConfigError(f"apt-get could not install {PACKAGE}: {last}", hint=hint)
    return find_java()


def write_archive(path: str) -> None:
    """Run what jobs do with Spark, and have Java write the archive to `path` as it ends.

    Java has this process's standard error for its log: who reads that to its end knows that the archive is written.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    conf = {"spark.driver.defaultJavaOptions": f"-XX:ArchiveClassesAtExit={path}"}
    options = SessionOptions(master="local[2]", conf=conf, log_file=Path("/dev/stderr"))
    with session(options) as spark, tempfile.TemporaryDirectory() as folder:
        numbers = [(number, number % 3, str(number)) for number in range(100)]
        rows = spark.createDataFrame(numbers, "a int, b int, c string")
        rows.write.partitionBy("b").parquet(f"{folder}/rows")
        read = spark.read.parquet(f"{folder}/rows")
        summed = read.groupBy("b").agg(f.count("*").alias("rows"), f.kll_sketch_agg_bigint("a").alias("sketch"))
        read.join(summed, "b").withColumn("next", f.lead("a").over(Window.partitionBy("b").orderBy("a"))).toPandas()
        rows.mapInPandas(lambda parts: parts, rows.schema).write.json(f"{folder}/lines")


def main() -> int:
    try:
        check_available(SPARK)
        try:
            java = find_java()
        except ConfigError:
            if not may_install():
                raise
            java = install()
    except ConfigError as error:
        say(f"pipeline: cannot run: {error}\nhint: {error.hint}", to_stderr=True)
        return 1
    say(f"pipeline: can run, with Java {java.version} in {java.home}")
    if not archive_path(java).is_file():
        say("pipeline: making the archive of Java's classes, once, which takes about 40 s ...")
        if failure := make_archive(java):
            say(f"pipeline: no archive, so that each start takes twice as long: {failure}")
    return 0


if __name__ == "__main__":
    try:
        if sys.argv[1:]:
            write_archive(sys.argv[1])
        else:
            sys.exit(main())
    except FlowctlError as failure:
        sys.exit(str(failure))
