"""Checks of a distribution as a whole: how it registers, what its records say and point at, how it listens, what its wheel holds."""

PARTS = ("registration", "records", "listening", "wheel")
