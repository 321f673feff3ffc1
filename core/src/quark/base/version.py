"""The one version number of every distribution in this repository."""

__all__ = ["VERSION"]

VERSION = "1.0.0a1"
