"""Run the benchmarks that need no model: ``python -m benchmarks``."""

from benchmarks import formats, startup

if __name__ == "__main__":
    startup.main([])
    formats.main([])
