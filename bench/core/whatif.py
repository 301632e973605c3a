"""How fast a what-if is: (core input x choice) per second and core, for a grid of about fifty choices.

``python bench whatif [--seconds 30] [--slow-share 0.05]``: makes recorded viewers of a stream of 2.5 Mbit/s
behind links of known speed, and runs the default grid over them on one core. Figures are given apart for viewers that
are never refused anything, for such with a refusal now and then, and for slow ones; and for a fleet of them with the
stated shares. What is counted as an input is said in `records.flight.whatif.types.Work`; `called` is the share of
these at which a Sender was really called. Time is processor time of this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any, Final

from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid
from flowctl.core.flow.state import MessageClass
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, Event, RecordedViewer, Work, on_grid
from kit.tables import table

FRAMES_PER_S, GOP_FRAMES, RATE, KERNEL_BYTES = 25, 50, 312_500, 128 * 1024


def stream(seconds: float, rng: random.Random) -> list[Event]:
    """Return the messages of a stream: 25 frames and 50 sounds a second, every third frame disposable."""
    inter, key = int(RATE * 0.7 / FRAMES_PER_S), int(RATE * 0.2 * GOP_FRAMES / FRAMES_PER_S)
    events: list[Event] = []
    for number in range(int(seconds * FRAMES_PER_S)):
        at = number / FRAMES_PER_S
        if number % GOP_FRAMES == 0:
            events.append((on_grid(at), int(MessageClass.KEY), int(key * rng.uniform(0.8, 1.2))))
        else:
            item = MessageClass.DISPOSABLE if number % 3 == 2 else MessageClass.INTER
            events.append((on_grid(at), int(item), int(inter * rng.uniform(0.5, 1.5))))
        events += [(on_grid(at + after), int(MessageClass.AUDIO), 400) for after in (0.001, 0.021)]
    return events


def viewer(seconds: float, rng: random.Random, share: Callable[[float], float] | None) -> RecordedViewer:
    """Return a viewer whose link carries `share(time)` of the stream; None: everything at once."""
    coming = stream(seconds, rng)
    events: list[Event] = []
    queued, held, last, number, blocked = 0, 0.0, 0.0, 0, False
    for step in range(1, int(seconds * FRAMES_PER_S) + 1):
        at = on_grid(step / FRAMES_PER_S)
        while number < len(coming) and coming[number][0] <= at:
            events.append(coming[number])
            queued += coming[number][2]
            number += 1
        if share is None:
            events.append((at, TAKEN, queued))
            queued = 0
            continue
        held, last = max(0.0, held - (at - last) * RATE * share(at)), at
        room = int(KERNEL_BYTES - held)
        if blocked and room < KERNEL_BYTES // 3:
            continue  # as a socket does: writable again when a third is free
        taken = min(room, queued)
        queued, held = queued - taken, held + taken
        blocked = queued > 0
        events.append((at, REFUSED if blocked else TAKEN, taken))
    return RecordedViewer(events=events, ended_at=seconds)


KINDS: dict[str, Callable[[float], float] | None] = {
    "never refused": None,
    "refused now and then": lambda at: 3.0 if int(at) % 10 else 0.6,
    "slow, 80 % of the rate": lambda _: 0.8,
    "slow, 50 %": lambda _: 0.5,
    "slow, 20 %": lambda _: 0.2,
}


QUICK: Final[dict[str, Any]] = {"seconds": 2.0}
"""Arguments of `run` for a look at whether it works."""
FLEET: Final = "fleet"


def run(seconds: float = 30.0, slow_share: float = 0.05, blip_share: float = 0.05) -> list[dict[str, Any]]:
    """Run the default grid over one viewer of each kind, and add up a fleet of them."""
    grid = default_grid(DEFAULT_IN_FORCE)
    found = {name: _measured(viewer(seconds, random.Random(1), share), grid) for name, share in KINDS.items()}
    slow = [name for name in KINDS if name.startswith("slow")]
    weights = {name: slow_share / len(slow) for name in slow}
    weights |= {"refused now and then": blip_share, "never refused": 1 - slow_share - blip_share}
    sums = [sum(weights[name] * found[name][column] for name in KINDS) for column in range(3)]
    rows = [_row(name, len(grid), *figures) for name, figures in found.items()]
    return [*rows, _row(f"{FLEET}: {slow_share:.0%} slow, {blip_share:.0%} now and then", len(grid), *sums)]


def _measured(recorded: RecordedViewer, grid: list[Choice]) -> tuple[float, float, float]:
    """Return (evaluations, Senders called, seconds of processor time) for one viewer."""
    evaluate(recorded, grid[:2])
    work, began = Work(), time.process_time()
    evaluate(recorded, grid, work=work)
    return work.inputs, work.shown, max(time.process_time() - began, 1e-6)


def _row(name: str, choices: int, inputs: float, called: float, took_s: float) -> dict[str, Any]:
    return {
        "viewers": name,
        "choices": choices,
        "evaluations": round(inputs),
        "called_percent": round(100 * called / inputs, 2),
        "evaluations_per_s": round(inputs / took_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--slow-share", type=float, default=0.05)
    parser.add_argument("--blip-share", type=float, default=0.05)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    rows = run(options.seconds, options.slow_share, options.blip_share)
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
