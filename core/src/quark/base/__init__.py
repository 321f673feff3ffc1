"""Modules that every other folder builds on: names, lazy references, the log, threads, processes and the
environment."""
