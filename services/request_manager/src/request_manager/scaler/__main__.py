"""`python -m request_manager.scaler`."""

import sys

from request_manager.scaler.service import main

sys.exit(main())
