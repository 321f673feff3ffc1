"""The one version number of every distribution in this repository."""

VERSION = "1.0.0a1"
