"""Sandboxes for frameworks that have their own idea of one. Each module needs its framework, and only then."""
