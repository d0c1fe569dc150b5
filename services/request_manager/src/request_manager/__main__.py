"""`python -m request_manager`."""

import sys

from request_manager.service import main

sys.exit(main())
