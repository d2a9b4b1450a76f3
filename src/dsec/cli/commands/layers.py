"""`dsec layer import`, `ls`, `rm`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.cli.commands.common import add_url, client, pairs
from dsec.cli.terminal import age, note, show_json, size, table
from dsec.cli.words import said
from dsec.model.errors import DsecError, InvalidSpec, NotFound

if TYPE_CHECKING:
    import argparse

    from dsec.sdk._sync.client import Client

DIGEST_PREFIX: Final = "sha256:"
# As many digits of a digest as `dsec layer ls` shows, and all of them.
DIGITS_SHOWN: Final = 12
DIGEST_DIGITS: Final = 64

_PATH_SCHEMES = ("dir:", "tar:", "erofs:", "store:")


def layer_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec layer`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser(
        "import", help="make a layer of a directory, a tar or a Debian release; again to correct its role or settings"
    )
    add.add_argument(
        "source", help="dir:PATH (the root of the layer), tar:PATH, erofs:PATH, store:DIR#LAYER or debootstrap:bookworm"
    )
    add.add_argument("name", help="name:tag, or name@version, which never moves")
    add.add_argument(
        "--role",
        choices=["base", "workspace", "toolkit"],
        default="base",
        help="where it may stand (default: %(default)s, anywhere)",
    )
    add.add_argument("--env", action="append", metavar="KEY=VALUE", help="for programs in it (repeatable)")
    add.add_argument("--cwd", metavar="DIR", help="where programs in it start")
    add.add_argument("--user", help="who programs in it run as")
    add.add_argument("--json", action="store_true", help="the layer as JSON")
    show = actions.add_parser("ls", help="list layers")
    show.add_argument("--json", action="store_true", help="a JSON list")
    remove = actions.add_parser("rm", help="remove layers that no sandbox uses")
    for action in (add, show, remove):
        add_url(action, below=True)
    remove.add_argument("layer", nargs="+", help="name:tag, name@version or a digest, as short as `ls` shows it")


def layer_command(args: argparse.Namespace) -> int:
    """What `dsec layer ACTION` does."""
    return {"import": _import, "ls": _list, "rm": _remove}[args.action](args)


def _import(args: argparse.Namespace) -> int:
    made = client(args)
    layer = made.layers.import_(
        _absolute(args.source),
        args.name,
        role=args.role,
        env=pairs("env", args.env),
        cwd=args.cwd,
        user=args.user,
        on_progress=note,
    )
    if args.json:
        show_json(layer)
    else:
        print(layer.digest)
    return 0


def _absolute(source: str) -> str:
    # The node resolves paths, and its working directory is not ours.
    for scheme in _PATH_SCHEMES:
        if source.startswith(scheme):
            return scheme + str(Path(source.removeprefix(scheme)).absolute())
    return source


def _list(args: argparse.Namespace) -> int:
    layers = client(args).layers.list()
    if args.json:
        show_json(layers)
        return 0
    now = time.time()
    rows = [
        (
            " ".join(layer.names) or "-",
            layer.role,
            size(layer.size_bytes),
            age(now - layer.created_at) if layer.created_at else "-",
            str(layer.in_use),
            layer.digest[: len(DIGEST_PREFIX) + DIGITS_SHOWN],
        )
        for layer in layers
    ]
    print(table(("NAME", "ROLE", "SIZE", "AGE", "IN USE", "DIGEST"), rows))
    return 0


def _remove(args: argparse.Namespace) -> int:
    made = client(args)
    failed = 0
    for ref in args.layer:
        try:
            print(_remove_one(made, ref))
        except DsecError as error:
            note(f"dsec: {ref}: {said(error)}")
            failed += 1
    return 1 if failed else 0


def _remove_one(made: Client, ref: str) -> str:
    """Removes a layer or one of its names; what was done."""
    full = _whole(made, ref)
    digest = made.layers.get(full).digest
    made.layers.remove(full)
    others = [name for layer in made.layers.list() if layer.digest == digest for name in layer.names]
    return f"{ref} (only the name: the layer is {' '.join(others)}, too)" if others else ref


def _whole(made: Client, ref: str) -> str:
    """The whole digest for its beginning, with `sha256:` before it or without; a name comes before a digest."""
    begins = ref if ref.startswith(DIGEST_PREFIX) else DIGEST_PREFIX + ref
    digits = begins.removeprefix(DIGEST_PREFIX)
    if begins == ref and len(digits) == DIGEST_DIGITS:
        return ref
    if not DIGITS_SHOWN <= len(digits) <= DIGEST_DIGITS or not set(digits) <= set("0123456789abcdef"):
        return ref
    layers = made.layers.list()
    if begins != ref and f"{ref}:latest" in (name for layer in layers for name in layer.names):
        return ref
    found = sorted({layer.digest for layer in layers if layer.digest.startswith(begins)})
    if not found:
        raise NotFound("no layer has this name or a digest that begins with it; `dsec layer ls` lists them")
    if len(found) > 1:
        raise InvalidSpec(f"{len(found)} layers have a digest that begins with it; give one of: {', '.join(found)}")
    return found[0]
