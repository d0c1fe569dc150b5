"""`python -m ssm_worker`."""

import sys

from ssm_worker.kinds import main

sys.exit(main())
