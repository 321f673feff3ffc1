"""What changes weights: the Rounding protocol, and round-to-nearest, the default."""

from quark.algorithms.rounding import Rounding, RoundToNearest
from quark.callable_module import make_callable
from quark.plugins import algorithms

__all__ = ["RoundToNearest", "Rounding"]

make_callable(__name__, algorithms)
