"""`python -m llm_verifier`."""

import sys

from llm_verifier.worker import main

sys.exit(main())
