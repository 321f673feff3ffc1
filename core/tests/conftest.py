"""Fixtures of these tests."""

from tests.kit.installed_folder import site

__all__ = ["site"]
