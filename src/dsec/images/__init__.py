"""Layers: importing, EROFS images, names and versions, the store."""

from dsec.images.catalog import Config, Role
from dsec.images.store import Imported, Layer, LayerStore

__all__ = ["Config", "Imported", "Layer", "LayerStore", "Role"]
