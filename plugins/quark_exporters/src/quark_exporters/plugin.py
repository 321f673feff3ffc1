"""What quark-exporters registers."""
