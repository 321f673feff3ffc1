"""Fuzzing of checkpoints: deterministic damage to their files, routes that read them, and outcomes."""
