"""The blocking client. Everything but `net` is generated from `dsec.sdk._async` by scripts/generate_sync.py."""
