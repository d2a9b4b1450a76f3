"""The programs layers are made with, found and probed: mkfs.erofs with `--tar`, mmdebstrap."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Final

from dsec.model.errors import Unsupported

MKFS_ENV: Final = "DSEC_MKFS_EROFS"
CACHE_ENV: Final = "DSEC_CACHE"
CACHE_DEFAULT: Final = "/var/cache/dsec"
PROBE_TIMEOUT_S: Final = 10


def cache_dir() -> Path:
    """Where large things that can be made again are kept, outside any clone."""
    return Path(os.environ.get(CACHE_ENV) or CACHE_DEFAULT)


@lru_cache(maxsize=8)
def mkfs_erofs(override: str | None = None) -> Path:
    """mkfs.erofs that reads a tar stream: $DSEC_MKFS_EROFS, set-up's build, or the distribution's if new enough.

    Raises Unsupported with what is there and what to do.
    """
    chosen = override or os.environ.get(MKFS_ENV)
    places = [chosen] if chosen else [str(cache_dir() / "bin/mkfs.erofs"), shutil.which("mkfs.erofs")]
    reasons = []
    for place in filter(None, places):
        reason = _lacks(place)
        if reason is None:
            return Path(place)
        reasons.append(f"{place}: {reason}")
    raise Unsupported.lacks(
        "making a layer",
        "mkfs.erofs",
        "; ".join(reasons or ["not installed"])
        + f" (erofs-utils 1.8 or newer is needed; scripts/setup builds it; {MKFS_ENV} names another)",
    )


def _lacks(program: str) -> str | None:
    try:
        done = subprocess.run([program, "--help"], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False, text=True)
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return "does not answer"
    missing = [word for word in ("--tar=", "--mkfs-time", "lz4") if word not in done.stdout + done.stderr]
    return f"has no {', '.join(missing)}" if missing else None


def mmdebstrap() -> str:
    """mmdebstrap, or Unsupported."""
    found = shutil.which("mmdebstrap")
    if found is None:
        raise Unsupported.lacks("making a Debian base", "mmdebstrap", "not installed (apt-get install mmdebstrap)")
    return found
