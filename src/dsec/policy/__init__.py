"""What a sandbox may reach: policies, their composition, the table that is enforced. Values only."""

from dsec.policy.compiler import compile_policy
from dsec.policy.explain import DENIED, explain, refuse_unenforced
from dsec.policy.merge import effective, exposes, merge, normal
from dsec.policy.operator import Mirror, Operator, operator
from dsec.policy.prefixes import Prefix, prefixes
from dsec.policy.table import Artifact, Query, Table, TableRule, Verdict, decide, resolves

__all__ = [
    "DENIED",
    "Artifact",
    "Mirror",
    "Operator",
    "Prefix",
    "Query",
    "Table",
    "TableRule",
    "Verdict",
    "compile_policy",
    "decide",
    "effective",
    "explain",
    "exposes",
    "merge",
    "normal",
    "operator",
    "prefixes",
    "refuse_unenforced",
    "resolves",
]
