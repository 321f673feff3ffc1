"""AMD Quark's public interface: its import paths, and the parts that the core lacks."""
