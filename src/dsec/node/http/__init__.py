"""The HTTP API of a node: raw ASGI and msgspec. `docs/reference/http-api.md` is the contract."""
