"""Fuzzing of checkpoints: seeded damage to their files, routes that read them, and outcomes."""
