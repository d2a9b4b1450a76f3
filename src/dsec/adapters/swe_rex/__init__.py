"""SWE-ReX's wire protocol, served for one sandbox: its stock `RemoteDeployment` connects to it.

    async with serve(sandbox, token) as (host, port):
        deployment = RemoteDeployment(host=f"http://{host}", port=port, auth_token=token)

or, for a program that has the framework, beside it: `python -m dsec.adapters.swe_rex SANDBOX`.
"""

from __future__ import annotations

from dsec.adapters import missing

try:
    from dsec.adapters.swe_rex.server import TOKEN_ENV, app, serve
except ModuleNotFoundError as error:
    raise missing(error, "swe-rex") from error

__all__ = ["TOKEN_ENV", "app", "serve"]
