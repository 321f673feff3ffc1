"""Number formats, one small file for each family."""
