"""Foundations of every other folder: names, late references, the log, threads, processes, the environment."""
