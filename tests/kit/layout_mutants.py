"""Layouts with one thing wrong each."""

HEALTHY = None
MUTANTS = ()
