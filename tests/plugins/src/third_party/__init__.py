"""A third party's plugins: one module a kind, each with the hook that registers it."""
