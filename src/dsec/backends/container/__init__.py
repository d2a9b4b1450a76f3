"""Containers: layers under a writable part, in namespaces of their own, made and watched by the native runtime."""

from dsec.backends.container.backend import ContainerBackend
from dsec.backends.container.keeper import Place, ensure_runtime, find_binary

__all__ = ["ContainerBackend", "Place", "ensure_runtime", "find_binary"]
