"""Number formats, with one file for each family."""
