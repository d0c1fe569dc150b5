"""What every test of the repository shares: property tests have no deadline, because CI machines stall."""

from hypothesis import settings

settings.register_profile("espalier", deadline=None)
settings.load_profile("espalier")
