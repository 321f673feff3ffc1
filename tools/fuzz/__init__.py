"""Fuzzing of checkpoints: seeded damage to the files, routes that read the damaged checkpoints, and
outcomes."""
