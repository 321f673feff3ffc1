"""Templates of model families, as files that contain only data."""
