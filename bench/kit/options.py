"""Options of benchmarks that let a crowd of viewers watch for a while."""

from __future__ import annotations

import argparse


def parse_crowd(argv: list[str] | None, description: str | None, *, viewers: int, flush: bool) -> argparse.Namespace:
    """Return the settings of a run; `viewers` is the usual number, `flush` says whether its interval may be chosen."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--viewers", type=int, default=viewers)
    parser.add_argument("--bit-rate", type=int, default=2_500_000)
    if flush:
        parser.add_argument("--flush", type=float, default=0.04, help="flush interval of flowctl in seconds")
    parser.add_argument("--window", type=float, default=10.0, help="measured seconds per run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)
