"""What a wrong field is told."""

from __future__ import annotations

import pytest

from dsec.model.errors import InvalidSpec
from dsec.model.specs import RunSpec, Spec, convert


@pytest.mark.parametrize(
    ("kind", "fields", "field", "said"),
    [
        (Spec, {"memory_mb": 5}, "memory_mb", "did you mean memory_mib?"),
        (RunSpec, {"timeout": 5}, "timeout", "did you mean timeout_s?"),
        (Spec, {"backend": "foo"}, "backend", "allowed: container, microvm, vm, fncall"),
        (Spec, {"cpu": "1"}, "cpu", "Expected `float`"),
    ],
)
def test_a_wrong_field_says_what_could_be_meant(
    kind: type[Spec] | type[RunSpec], fields: dict[str, object], field: str, said: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        convert(fields, kind)
    assert caught.value.detail["field"] == field
    assert said in caught.value.message
