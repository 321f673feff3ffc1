"""What holds for every test of the repository."""

from hypothesis import settings

# How long an example takes says more about the machine than about the law it is an example of.
settings.register_profile("quark", deadline=None)
settings.load_profile("quark")
