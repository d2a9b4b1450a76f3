"""The executable suite that every backend passes.

`CHECKS` is a list of named coroutines; each takes a `Subject`, which makes backends over one machine and plans for
it. A check that needs something a subject does not have (a real user space, limits of a kernel) says so in `needs`, and
is left out by `applicable`. Nothing here depends on a test framework: a check raises `Violation` or returns.
"""

from __future__ import annotations

from dsec.backends.conformance import changes, ends, idempotence, inside, isolation, lifecycle, output
from dsec.backends.conformance.kit import Check, Subject, Violation, checks, perform

__all__ = ["CHECKS", "Check", "Subject", "Violation", "applicable", "perform"]

# Importing a module registers its checks; named here so that the list cannot lose one silently.
_MODULES = (lifecycle, ends, output, idempotence, inside, isolation, changes)

CHECKS: tuple[Check, ...] = checks(module.__name__ for module in _MODULES)


def applicable(subject_has: frozenset[str]) -> list[Check]:
    """The checks for a subject with these abilities."""
    return [check for check in CHECKS if check.needs <= subject_has]
