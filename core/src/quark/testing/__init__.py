"""Helpers of tests and demonstrations: the tiny model."""
