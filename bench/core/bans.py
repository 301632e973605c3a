"""What a ban list costs at accept: a look-up among up to 100,000 bans, beside no list and beside the whole admission.

Run ``python bench bans``. Each accepted connection asks once. Single addresses are found by their text;
networks cost one step per prefix length, and the address has to be parsed for them. Reading a list is done once per
change, on a thread of its own, which rests after each millisecond of work; what is told is the time without rests.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import timeit
from datetime import UTC, datetime
from typing import Any, Final

from flowctl.core.server.admission import Admission, AdmissionLimits
from flowctl.core.server.bans import Ban, BanList, render

NOW: Final = 1_800_000_000
_ENDS: Final = datetime.fromtimestamp(NOW + 3600, UTC)
SEED: Final = 4
_LENGTHS: Final = (12, 16, 20, 24, 28)
QUICK: Final[dict[str, Any]] = {"sizes": (0, 100), "budget_s": 0.01}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def made(count: int, *, networks: bool) -> list[Ban]:
    """Return `count` bans of random single addresses, or of those and a hundredth of networks of five lengths."""
    numbers = random.Random(SEED)
    bans = []
    for index in range(count):
        address = numbers.randrange(0x0B000000, 0xDF000000)
        length = numbers.choice(_LENGTHS) if networks and index % 100 == 0 else 32
        shown = ".".join(str(octet) for octet in (address >> 32 - length << 32 - length).to_bytes(4, "big"))
        bans.append(
            Ban(
                cidr=f"{shown}/{length}",
                expires=_ENDS,
                score=9.5,
                evidence={"handshake_timeout": 7},
            )
        )
    return bans


def _ns(call: Any, budget_s: float) -> float:
    """Return the nanoseconds of a call: the best of five, which is what the machine can do."""
    timer = timeit.Timer(call)
    count, taken = timer.autorange()
    count = max(1, int(count * budget_s / 5 / max(taken, 1e-9)))
    return min(timer.repeat(5, count)) / count * 1e9


def run(sizes: tuple[int, ...] = (0, 100, 10_000, 100_000), budget_s: float = 1.0) -> list[dict[str, Any]]:
    """Measure look-ups in lists of several sizes."""
    rows = []
    for size in sizes:
        for networks in (False, True) if size else (False,):
            bans = made(size, networks=networks)
            text = render(bans)
            begun = time.perf_counter()
            found = BanList.parse(text)
            read_ms = (time.perf_counter() - begun) * 1e3
            admission = Admission(AdmissionLimits(new_per_address_and_s=0), wall=lambda: NOW)
            admission.bans = found
            banned = bans[-1].cidr.partition("/")[0] if bans else "10.0.0.1"

            def visit(admission: Admission = admission) -> None:
                admission.enter("10.1.2.3", 1.0)
                admission.leave("10.1.2.3")

            rows.append(
                {
                    "bans": size,
                    "kind": "addresses and networks" if networks else "addresses",
                    "not_banned_ns": round(_ns(lambda found=found: found.match("10.1.2.3", NOW), budget_s)),
                    "banned_ns": round(_ns(lambda found=found, banned=banned: found.match(banned, NOW), budget_s)),
                    "admission_ns": round(_ns(visit, budget_s)),
                    "read_ms": round(read_ms, 1),
                }
            )
    return rows


def main() -> None:
    """Print the rows of `run` as a table, or as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description="Cost of a ban list at accept.")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    arguments = parser.parse_args()
    rows = run()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'bans':>7} {'kind':<24}{'not banned ns':>14}{'banned ns':>11}{'admission ns':>14}{'read ms':>9}")
    for row in rows:
        print(
            f"{row['bans']:>7} {row['kind']:<24}{row['not_banned_ns']:>14}{row['banned_ns']:>11}"
            f"{row['admission_ns']:>14}{row['read_ms']:>9}"
        )


if __name__ == "__main__":
    main()
