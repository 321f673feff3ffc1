"""Counted costs of runs: FLOPs, bytes, operations and waits for a device."""
