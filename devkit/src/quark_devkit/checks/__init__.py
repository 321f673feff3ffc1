"""The checks: one module for each kind of subject, named as the kind."""
