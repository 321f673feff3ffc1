"""The public names and signatures of the plugin API, recorded for each version of it, so that nothing of it vanishes unseen."""
