"""What changes weights: the Rounding protocol, and round-to-nearest, the default."""

from quark.algorithms.rounding import Rounding, RoundToNearest

__all__ = ["RoundToNearest", "Rounding"]
