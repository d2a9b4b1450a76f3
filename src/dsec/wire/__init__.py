"""The one internal protocol: frames, the values that cross it, the client of the native runtime."""
