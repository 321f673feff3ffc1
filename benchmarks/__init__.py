"""Benchmarks: ratios to a floor measured in the same run. `make bench` runs those that need nothing but this repository."""
