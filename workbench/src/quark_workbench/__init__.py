"""Commands that work on models and checkpoints; evaluation, reports and mixed precision of their runs."""
