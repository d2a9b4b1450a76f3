"""`python -m dsec.images --store DIR import SOURCE NAME | ls | rm REF`: a store without a node, for set-up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

from dsec.images import LayerStore, Role
from dsec.images.debootstrap import Recipe
from dsec.model.errors import DsecError


def main() -> int:
    """Runs one command; 1 and a message when it fails."""
    parser = argparse.ArgumentParser(prog="python -m dsec.images")
    parser.add_argument("--store", type=Path, required=True, help="the state directory")
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import", help="make a layer and name it")
    importing.add_argument("source")
    importing.add_argument("name")
    importing.add_argument("--role", default="base")
    importing.add_argument("--if-changed", action="store_true", help="keep what is there from the same source")
    commands.add_parser("ls", help="list layers")
    removing = commands.add_parser("rm", help="remove a name or a layer")
    removing.add_argument("ref")
    args = parser.parse_args()
    try:
        _COMMANDS[args.command](LayerStore(args.store), args)
    except DsecError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    return 0


def _import(store: LayerStore, args: argparse.Namespace) -> None:
    if args.if_changed and _unchanged(store, args):
        return
    made = store.import_source(
        args.source,
        args.name,
        role=cast("Role", args.role),
        progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    for kind, count in made.report.dropped.items():
        print(f"  left out: {count} {kind}: {', '.join(made.report.examples[kind])}", file=sys.stderr)
    print(f"{args.name} {made.layer.digest} {made.layer.size_bytes}")


def _unchanged(store: LayerStore, args: argparse.Namespace) -> bool:
    """Whether the name stands for what the source would give, as far as that can be told without making it."""
    have = store.get(args.name)
    if have is None:
        return False
    scheme, _, rest = args.source.partition(":")
    if scheme == "debootstrap":
        return have.source == Recipe(rest).source
    if scheme == "store":
        directory, _, ref = rest.partition("#")
        theirs = LayerStore(Path(directory)).get(ref)
        return theirs is not None and theirs.digest == have.digest
    return False


def _list(store: LayerStore, args: argparse.Namespace) -> None:
    for layer in store.list():
        print(f"{layer.digest}\t{layer.size_bytes}\t{layer.role}\t{','.join(layer.names)}\t{layer.source}")


def _remove(store: LayerStore, args: argparse.Namespace) -> None:
    store.remove(args.ref)


_COMMANDS = {"import": _import, "ls": _list, "rm": _remove}

if __name__ == "__main__":
    sys.exit(main())
