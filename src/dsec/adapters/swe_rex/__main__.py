"""`python -m dsec.adapters.swe_rex SANDBOX`: serve a sandbox until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from contextlib import suppress

import dsec
from dsec.adapters.swe_rex.server import TOKEN_ENV, serve
from dsec.linux.descriptors import open_standard


def main() -> int:
    """The command."""
    open_standard()
    parser = argparse.ArgumentParser(prog="python -m dsec.adapters.swe_rex", description=__doc__)
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("--url", help="the node or gateway (default: DSEC_URL, else this machine's node)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve(parser.parse_args()))
    except (dsec.DsecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(args: argparse.Namespace) -> None:
    # Not on the command line, where everybody on the machine could read it.
    token = os.environ.get(TOKEN_ENV) or secrets.token_urlsafe(32)
    sandbox = await dsec.AsyncClient(args.url).get(args.sandbox)
    async with serve(sandbox, token, host=args.host, port=args.port) as (host, port):
        print(f"--deployment.type=remote --deployment.host=http://{host} --deployment.port={port}", flush=True)
        if TOKEN_ENV not in os.environ:
            print(f"--deployment.auth_token={token}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
