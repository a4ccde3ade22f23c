"""`python -m dtem.cli`: the `dtem` command without its script."""

import sys

from dtem.cli import main

sys.exit(main())
