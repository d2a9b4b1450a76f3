"""What a wrong field is told."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

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
        (Spec, {"cpu": "1"}, "cpu", "cpu='1' is not allowed; allowed: a number of cores"),
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
        ({"memory_mib": "64"}, "memory_mib", "memory_mib='64' is not allowed; allowed: a whole number of MiB"),
        ({"env": {"A": 1}}, "env", "env: the value of 'A' is of the type int; allowed: str"),
        ({"labels": {5: "a"}}, "labels", "labels=5 is not allowed; allowed: names that are str, not int"),
        ({"env": ["A=1"]}, "env", 'env is of the type list; allowed: a dict, as {"name": "value"}'),
        ({"env": "A=1"}, "env", "env is of the type str;"),
        ({"env": None}, "env", "env=None is not allowed"),
        ({"cpu": True}, "cpu", "cpu=True is not allowed; allowed: a number of cores"),
        (
            {"idle_timeout_s": "1h"},
            "idle_timeout_s",
            "idle_timeout_s='1h' is not allowed; allowed: a number of seconds or None",
        ),
        ({"toolkits": "x@1"}, "toolkits", "allowed: a list of str"),
        ({"base": 5}, "base", "base=5 is not allowed; allowed: a str or None"),
        ({"no_new_privs": "y"}, "no_new_privs", "allowed: True or False"),
        ({"user": True}, "user", 'user=True is not allowed; allowed: a name, or a number as 1000, or "1000:1000"'),
        ({"user": -1}, "user", "user='-1' is not allowed; allowed: name, uid, name:group or uid:gid"),
        ({"network": ["pypi"]}, "network", 'network is of the type list; allowed: a dict ({"pypi": True}); by default'),
        (
            {"network": {"pypi": True, 5: True}},
            "network",
            "network=5 is not allowed; allowed: names that are str, not int",
        ),
        ({"nonsense": 5}, "nonsense", "Spec has no field nonsense"),
        ({"cwd": Path("relative")}, "cwd", "cwd='relative' is not allowed; allowed: an absolute path"),
        ({"cwd": Path("/tmp"), "cpu": "1"}, "cpu", "a number of cores"),
        ({"backend": "foo"}, "backend", "allowed: container"),
    ],
)
def test_a_spec_is_looked_at_when_it_is_made(fields: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Spec(**fields).check()  # type: ignore[arg-type]  # what is refused
    assert caught.value.detail["field"] == field
    assert said in caught.value.message


def test_a_path_may_be_one() -> None:
    assert Spec(cwd=Path("/tmp/\udcff")) == Spec(cwd="/tmp/\udcff")  # type: ignore[arg-type]  # as `create` takes it


def test_a_spec_is_a_struct_as_others_are() -> None:
    spec = Spec(cpu=2, toolkits=("a:1",), env={"A": "1"})
    assert spec == Spec.build(cpu=2.0, toolkits=["a:1"], env={"A": "1"})
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == msgspec.structs.replace(spec, cpu=2) == spec
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=Spec) == spec
    with pytest.raises(TypeError, match="positional"):
        Spec("debian:12")  # type: ignore[misc]  # what is refused
