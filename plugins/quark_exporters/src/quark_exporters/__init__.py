"""The plugin quark-exporters, with exporters, readers and dequantizers for checkpoint layouts."""
