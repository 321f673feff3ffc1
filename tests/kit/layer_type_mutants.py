"""Layer types with one thing wrong each."""

HEALTHY = None
MUTANTS = ()
