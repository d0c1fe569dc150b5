"""What every test of the repository shares: property tests without deadlines (CI machines stall), and a real broker."""

from hypothesis import settings

pytest_plugins = ("treecore.testing.nats",)

settings.register_profile("espalier", deadline=None)
settings.load_profile("espalier")
