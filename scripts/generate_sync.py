#!/usr/bin/env python3
"""Write src/dsec/sdk/_sync from src/dsec/sdk/_async by replacing words; `--check` only compares.

`net.py` is written by hand in both: it is where blocking and asyncio differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/dsec/sdk/_async"
TARGET = ROOT / "src/dsec/sdk/_sync"
BY_HAND = ("__init__.py", "net.py")
NOTE = "# Generated from dsec/sdk/_async/{name} by scripts/generate_sync.py: edit that file.\n\n"

WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\b__aiter__\b", "__iter__"),
    (r"\b__anext__\b", "__next__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bdsec\.sdk\._async\b", "dsec.sdk._sync"),
)


def convert(text: str, name: str) -> str:
    """The blocking twin of one source file, formatted."""
    for pattern, new in WORDS:
        text = re.sub(pattern, new, text)
    for command in (["check", "--select", "I", "--fix", "--quiet", "--exit-zero"], ["format", "--quiet"]):
        line = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET / name), "-"]
        text = subprocess.run(line, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return NOTE.format(name=name) + text


def generate() -> dict[Path, str]:
    """Every generated file and what it should contain."""
    names = sorted(path.name for path in SOURCE.glob("*.py") if path.name not in BY_HAND)
    return {TARGET / name: convert((SOURCE / name).read_text("utf-8"), name) for name in names}


def main() -> int:
    """Write what differs; with --check say so and fail."""
    wanted = generate()
    present = {path: path.read_text("utf-8") for path in TARGET.glob("*.py") if path.name not in BY_HAND}
    stale = sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))
    for path in stale:
        print(path.relative_to(ROOT))
        if "--check" in sys.argv:
            continue
        if path in wanted:
            path.write_text(wanted[path], "utf-8")
        else:
            path.unlink()
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
