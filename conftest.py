"""What every test of the repository shares: property tests without deadlines (CI machines stall), and a real broker."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores: more threads than cores is many times slower

pytest_plugins = ("treecore.testing.nats",)

settings.register_profile("espalier", deadline=None)
settings.load_profile("espalier")
