"""The names and signatures of the plugin API, recorded for each version."""
