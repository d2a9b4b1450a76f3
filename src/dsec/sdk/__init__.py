"""The SDK: `Client`, `Sandbox` and their async twins. What is public is in `dsec`."""
