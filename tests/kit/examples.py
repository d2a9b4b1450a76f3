"""The Python examples in the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Each by the module of dsec.adapters it is about. They need its framework, so that the lane `adapters` runs them.
OF_ADAPTERS = {
    "deepagents": ROOT / "docs/howto/deepagents.md",
    "inspect": ROOT / "docs/howto/inspect-ai.md",
    "mini_swe_agent": ROOT / "docs/howto/mini-swe-agent.md",
    "swe_rex": ROOT / "docs/howto/swe-rex.md",
}
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorial").glob("*.md")),
    *sorted(set((ROOT / "docs/howto").glob("*.md")) - set(OF_ADAPTERS.values())),
)


def examples(pages: Iterable[Path] = PAGES) -> list[tuple[str, str]]:
    """(page:number, code) of each."""
    found = []
    for page in pages:
        for number, match in enumerate(_BLOCK.finditer(page.read_text("utf-8")), 1):
            found.append((f"{page.relative_to(ROOT)}:{number}", match.group(1)))
    return found
