"""Debian guests under QEMU: built once, booted once, snapshotted, restored for each use."""
