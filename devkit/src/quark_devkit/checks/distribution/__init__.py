"""Checks of a distribution as a whole: registration, records, event hook, wheel."""

PARTS = ("registration", "records", "importing", "listening", "wheel")
