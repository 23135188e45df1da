"""``python -m olla_fx`` is the command ``olla-fx``."""

import sys

from olla_fx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
