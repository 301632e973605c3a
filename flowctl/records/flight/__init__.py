"""The flight recorder: every input of one connection's Sender on a tape, so that its history can be run again.

Theory of operation. A `RecordedSender` is a Sender whose every entrance notes the call on a `Tape` first: what was
called, with which arguments, at which microsecond. During the call time stands still at that microsecond, and what the
Sender asks of its surroundings (what the kernel takes, what it holds, whether the thread was strained) is noted as it
is answered. `records.flight.replay` makes the same calls of another Sender and gives the same answers. The rules in
between are the real ones, so states, drops, returns and the end come out again, or the code has changed.

A viewer's stream log is written by another thread, and a Sender reads its end at several moments of one call: which
of them saw which message cannot be recorded. So a recorded viewer has a log of its own, which is filled from the real
one under its lock, before each call (`flowctl.records.flight.feed`). The messages themselves are shared, not copied.

Modules: `words` (what the rows say), `tape` (rows in order, bounded), `feed` (the private log), `recorded` (the
Sender), `flights` (which connections are recorded).

Begin with `recorded.py`.
"""
