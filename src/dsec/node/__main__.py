"""`python -m dsec.node`: the node agent."""

from __future__ import annotations

import os
import sys

from dsec.linux.descriptors import open_standard
from dsec.model.errors import DsecError
from dsec.node.config import parse
from dsec.node.serve import serve


def main() -> int:
    """Run a node; 2 when it is set up wrongly, 1 when it cannot run here."""
    open_standard()
    try:
        config = parse()
    except DsecError as error:
        print(f"dsec.node: {error}", file=sys.stderr)
        return 2
    os.chdir("/")  # where it was started may have to be unmounted while it runs
    try:
        serve(config)
    except DsecError as error:
        print(f"dsec.node: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
