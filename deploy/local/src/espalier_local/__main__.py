"""`python -m espalier_local` is the `espalier` command."""

import sys

from espalier_local.cli import main

sys.exit(main())
