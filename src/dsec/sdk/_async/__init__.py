"""The asyncio client; `dsec.sdk._sync` is generated from it. Only `net` differs between the two."""
