"""How fast a what-if is: (core input x choice) per second and core, for a grid of about fifty choices.

``python bench/bench_whatif.py [--seconds 30] [--slow-share 5%]``: makes recorded viewers of a stream of 2.5 Mbit/s
behind links of known speed, and runs the default grid over them on one core. Figures are given apart for viewers that
are never refused anything, for such with a refusal now and then, and for slow ones; and for a fleet of them with the
stated shares. What is counted as an input is said in `flowctl.whatif.Work`; `called` is the share of these at which a
Sender was really called. Time is processor time of this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from flowctl.flow import MessageClass
from flowctl.pipeline.whatif_grid import DEFAULT_IN_FORCE, default_grid
from flowctl.whatif import REFUSED, TAKEN, Event, RecordedViewer, Work, evaluate, on_grid
from machine import RESULTS, machine

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--slow-share", type=float, default=0.05)
    parser.add_argument("--blip-share", type=float, default=0.05)
    options = parser.parse_args()
    grid = default_grid(DEFAULT_IN_FORCE)
    rates: dict[str, tuple[int, float]] = {}
    for name, share in KINDS.items():
        recorded = viewer(options.seconds, random.Random(1), share)
        evaluate(recorded, grid[:2])
        work, began = Work(), time.process_time()
        evaluate(recorded, grid, work=work)
        took = time.process_time() - began
        rates[name] = (work.inputs, took)
        print(f"{name}: {work.inputs / took / 1e6:.3f} M/s, called {work.shown / work.inputs:.1%}, {took:.2f} s")
    slow = [rates[name] for name in KINDS if name.startswith("slow")]
    parts = [
        (1 - options.slow_share - options.blip_share, *rates["never refused"]),
        (options.blip_share, *rates["refused now and then"]),
        *((options.slow_share / len(slow), *rate) for rate in slow),
    ]
    fleet = sum(share * inputs for share, inputs, _ in parts) / sum(share * took for share, _, took in parts)
    mix = f"{options.slow_share:.0%} slow, {options.blip_share:.0%} refused now and then"
    print(f"{len(grid)} choices; fleet with {mix}: ", end="")
    print(f"{fleet / 1e6:.2f} M/s and core")
    found = {name: round(inputs / took) for name, (inputs, took) in rates.items()}
    text = {"machine": machine(), "choices": len(grid), "per_s": {**found, "fleet": round(fleet)}}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "whatif.json").write_text(json.dumps(text, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
