"""Everything that touches transformers' internals: loading, the layout of its checkpoints, its attention."""
