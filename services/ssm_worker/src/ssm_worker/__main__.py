"""`python -m ssm_worker`."""

import sys

from ssm_worker.worker import main

sys.exit(main())
