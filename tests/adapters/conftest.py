"""What the suites share: a node that the dsec command has started."""

from tests.kit.home import home

__all__ = ["home"]
