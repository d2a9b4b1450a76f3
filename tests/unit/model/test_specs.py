"""What a wrong field is told."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from dsec.model.convert import convert
from dsec.model.errors import InvalidSpec
from dsec.model.specs import RunSpec, Spec


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


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"timeout": 3}, "timeout", "did you mean lifetime_s?"),
        ({"memory": 5}, "memory", "did you mean memory_mib?"),
        ({"memory_mib": "64"}, "memory_mib", "Expected `int`, got `str`"),
        ({"env": {"A": 1}}, "env", "Expected `str`, got `int`"),
        ({"cpu": True}, "cpu", "Expected `float`, got `bool`"),
        ({"backend": "foo"}, "backend", "allowed: container"),
    ],
)
def test_a_spec_is_looked_at_when_it_is_made(fields: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Spec(**fields)  # type: ignore[arg-type]  # what is refused
    assert caught.value.detail["field"] == field
    assert said in caught.value.message


def test_a_spec_is_a_struct_as_others_are() -> None:
    spec = Spec(cpu=2, toolkits=("a:1",), env={"A": "1"})
    assert spec == Spec.build(cpu=2.0, toolkits=["a:1"], env={"A": "1"})
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == msgspec.structs.replace(spec, cpu=2) == spec
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=Spec) == spec
    with pytest.raises(TypeError, match="positional"):
        Spec("debian:12")  # type: ignore[misc]  # what is refused
