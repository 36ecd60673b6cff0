"""`python -m pdplane` is the `pdplane` command."""

from __future__ import annotations

import sys

from pdplane.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
