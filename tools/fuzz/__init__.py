"""Fuzzing of checkpoints: deterministic damage to their files, the routes that read them, and counts of how runs end."""
