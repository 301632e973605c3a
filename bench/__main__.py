"""One benchmark by itself, with options of its own, for those who look closer: ``python bench NAME --help``."""

from __future__ import annotations

import sys

from run import load, names

if __name__ == "__main__":
    usage = f"usage: python bench NAME [options]\nhint: there are {', '.join(names())}"
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    if sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(f"{usage}\n")
        raise SystemExit(0)
    name = sys.argv.pop(1)
    sys.argv[0] = f"bench {name}"
    sys.exit(load(name).main())
