"""AMD Quark's public interface: its import paths, and what it has beside the core."""
