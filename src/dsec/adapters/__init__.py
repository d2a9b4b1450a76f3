"""Sandboxes for frameworks that have their own idea of one. Each module needs its framework, and only then."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error of an adapter whose framework is not there: with what brings it, an extra of this package."""
    text = f"this adapter needs {error.name}, which is not installed: pip install 'dsec[{extra}]'"
    return ModuleNotFoundError(text, name=error.name, path=error.path)
