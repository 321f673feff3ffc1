"""For tests and demonstrations: the bundled tiny model."""
