"""The checks: one module or package for each kind of subject, with the name of the kind."""
