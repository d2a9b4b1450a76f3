"""The Python examples in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorial").glob("*.md")),
    *sorted((ROOT / "docs/howto").glob("*.md")),
)


def examples() -> list[tuple[str, str]]:
    """(page:number, code) of each."""
    found = []
    for page in PAGES:
        for number, match in enumerate(_BLOCK.finditer(page.read_text("utf-8")), 1):
            found.append((f"{page.relative_to(ROOT)}:{number}", match.group(1)))
    return found
