"""Where random tests begin: at the same seeds each time, or at those of ``pytest --seed`` (`make fuzz`).

Tests of hypothesis follow the option by themselves.
"""

from __future__ import annotations

import os

SEED = "FLOWCTL_TEST_SEED"
"""The variable by which `conftest` tells processes and modules of tests where to begin."""


def seeds(count: int) -> range:
    """Return `count` seeds for a test that makes its own history."""
    first = int(os.environ.get(SEED, "0"))
    return range(first, first + count)
