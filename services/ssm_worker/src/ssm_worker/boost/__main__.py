"""`python -m ssm_worker.boost`."""

import sys

from ssm_worker.boost.cli import main

sys.exit(main(sys.argv[1:]))
