"""Layers: importing, EROFS images, names and versions, the store."""

from dsec.images.catalog import Config, Role
from dsec.images.store import Imported, LayerStore

__all__ = ["Config", "Imported", "LayerStore", "Role"]
