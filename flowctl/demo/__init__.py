"""The demonstration: a live server, a publisher, and viewers of all kinds, watched and judged.

Begin with `run.py`.
"""

from flowctl.demo.plan import DemoPlan
from flowctl.demo.run import run_demo

__all__ = ["DemoPlan", "run_demo"]
