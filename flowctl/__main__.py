"""``python -m flowctl`` is the command ``flowctl``."""

import sys

from flowctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
