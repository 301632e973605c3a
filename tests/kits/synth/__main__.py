"""Makes records from the command line: ``PYTHONPATH=tests/kits python -m synth OUT --events 1M``."""

from __future__ import annotations

import argparse
import sys
import time

from flowctl.analyze.options import number
from flowctl.analyze.spark.session import SessionOptions, session
from synth.make import make
from synth.people import SynthOptions


def main() -> None:
    """Make records that end in this hour, because evidence of long ago is worth nothing to a job."""
    parser = argparse.ArgumentParser(prog="synth", description=__doc__)
    parser.add_argument("out", help="new folder")
    parser.add_argument("--events", default="100k", help="about how many closes and events, like 10M")
    parser.add_argument("--samples-s", type=float, help="also make flow_samples, one per so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=1.0)
    arguments = parser.parse_args()
    options = SynthOptions(
        events=number(arguments.events, "--events"),
        samples_s=arguments.samples_s,
        seed=arguments.seed,
        days=arguments.days,
        start_s=int(time.time() // 3600 * 3600 - arguments.days * 86_400),
    )
    with session(SessionOptions()) as spark:
        sys.stdout.write(f"{make(spark, arguments.out, options)}\n")


if __name__ == "__main__":
    main()
