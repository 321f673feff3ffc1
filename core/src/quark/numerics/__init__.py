"""Numerics: number formats, observers and tensor quantizers; protocols and the machinery that serves them all."""
