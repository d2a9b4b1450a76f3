"""The `dsec` command."""
