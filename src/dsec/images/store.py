"""The layers of a node: content-addressed EROFS files `STATE_DIR/layers/sha256-<hex>.erofs` and their names.

All methods block and may be called from any thread; the agent calls them in one. Several processes may use a store
at once: files appear whole by rename, names change in one transaction, work in progress is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dsec.images import debootstrap, files, tools
from dsec.images.admit import Report
from dsec.images.build import Progress, build, image_options
from dsec.images.catalog import Catalog, Config, Role, Row
from dsec.images.orders import Order
from dsec.images.refs import Ref, parse
from dsec.model import failpoint
from dsec.model.errors import Conflict, CorruptLayer, DsecError, InvalidSpec, NodeDiskFull, NotFound
from dsec.model.states import LayerInfo

ROLES: Final = ("base", "workspace", "toolkit")
EROFS_MAGIC: Final = bytes.fromhex("e2e1f5e0")
EROFS_MAGIC_OFFSET: Final = 1024
BLOCK_BYTES: Final = 4096
_STAGING: Final = "making-"
# Of the names a message offers.
_NAMES_SHOWN: Final = 8


class Imported(msgspec.Struct, frozen=True):
    """What came of an import: the layer, whether its content was here before, what was left out."""

    layer: LayerInfo
    existed: bool
    report: Report


class Request(Protocol):
    """What a layer is made of, as a node is asked for it."""

    @property
    def source(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def role(self) -> Role: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def cwd(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...


class LayerStore:
    """The layers below `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir / "layers"
        self._dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._home = str(self._dir)
        self._catalog = Catalog(self._dir / "catalog.sqlite")
        self._sweep()

    # -- reading ---------------------------------------------------------------------------------------------------

    def list(self) -> list[LayerInfo]:
        """Every layer, oldest first; once for each of the settings its names have."""
        return [_info(row) for row in self._catalog.all()]

    def has(self) -> str:
        """Its names in words, for who asked for another."""
        names = sorted({name for info in self.list() for name in info.names})
        shown = ", ".join(names[:_NAMES_SHOWN]) or "nothing"
        return f"there is {shown}" + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")

    def resolve(self, ref: str, field: str = "layer") -> LayerInfo:
        """The layer a reference means now, or NotFound; InvalidSpec when it is no reference."""
        parsed = parse(ref, field)
        row = self._catalog.find(parsed)
        if row is None:
            raise self._missing(parsed, field)
        layer = _info(row)
        self.check_file(layer)
        return layer

    def _missing(self, ref: Ref, field: str) -> NotFound:
        from difflib import get_close_matches  # only for who mistyped

        names = [name for info in self.list() for name in info.names]
        near = get_close_matches(str(ref), names, n=1)
        hint = f"did you mean {near[0]}?" if near else self.has()
        return NotFound(f"no layer {ref} on this node; {hint}", detail={"field": field, "ref": str(ref), "hint": hint})

    def state(self) -> object:
        """As long as a thread gets the same, every reference means to it what it meant before."""
        return self._catalog.state()

    def check_file(self, layer: LayerInfo) -> None:
        """CorruptLayer when the image is not there, or not whole."""
        path = self.path(layer.digest)
        try:
            size = os.stat(path).st_size  # noqa: PTH116  # as in `path`
        except FileNotFoundError:
            size = -1
        if size != layer.size_bytes:
            raise CorruptLayer(
                f"layer {layer.digest}: {path} has {size} bytes, not {layer.size_bytes}; remove the layer and import "
                "it again",
                detail={"digest": layer.digest},
            )

    def get(self, ref: str) -> LayerInfo | None:
        """As `resolve`, but None when there is none."""
        with contextlib.suppress(NotFound):
            return self.resolve(ref)
        return None

    def path(self, digest: str) -> str:
        """Where the image of a layer lies."""
        # Asked for with every sandbox: a path of `pathlib` costs ten times as much.
        return f"{self._home}/{_file_name(digest)}"

    def verify(self, ref: str) -> LayerInfo:
        """As `resolve`, and reads the whole file: CorruptLayer when its bytes are not what the digest says."""
        layer = self.resolve(ref)
        actual = files.digest(self._path(layer.digest))
        if actual != layer.digest:
            raise CorruptLayer(
                f"layer {layer.digest}: the bytes of {self.path(layer.digest)} are {actual}",
                detail={"digest": layer.digest},
            )
        return layer

    # -- importing -------------------------------------------------------------------------------------------------

    def import_source(
        self,
        source: str,
        name: str | None = None,
        *,
        role: Role = "base",
        config: Config | None = None,
        whiteouts: bool = False,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Imported:
        """A layer from `dir:/path`, `tar:/path`, `erofs:/path`, `store:/state/dir#ref` or `debootstrap:SUITE`.

        `role` and `config` go with the name: the same content may be there under another name with other ones.
        """
        scheme, found, rest = source.partition(":")
        importer = {
            "dir": self._from_dir,
            "tar": self._from_tar,
            "erofs": self._from_image,
            "debootstrap": self._from_debootstrap,
        }.get(scheme)
        if scheme == "store" and found:
            try:
                return self._adopt(rest, name)
            except OSError as error:
                raise _translated(error, source) from error
        if importer is None or not rest:
            raise InvalidSpec.field(
                "source", source, "dir:/path, tar:/path, erofs:/path, store:/state/dir#ref or debootstrap:SUITE"
            )
        refs = _refs_for(name)
        if role not in ROLES:
            raise InvalidSpec.field("role", role, ", ".join(ROLES))
        try:
            with self._staging() as staging:
                made = importer(rest, _Job(staging, whiteouts, progress, cancel))
                failpoint.at("layer.made")
                row = Row("", 0, time.time(), role, made.source or source, config or made.config)
                layer, existed = self._publish(made.image, row, refs)
        except OSError as error:
            raise _translated(error, source) from error
        return Imported(layer, existed, made.report)

    def import_layer(self, request: Request, progress: Progress) -> LayerInfo:
        """The same, as a node's API asks for it."""
        config = Config(request.env, request.cwd, request.user)
        made = self.import_source(
            request.source,
            request.name,
            role=request.role,
            config=None if config == Config() else config,
            progress=progress,
        )
        for kind, count in made.report.dropped.items():
            progress(f"left out: {count} {kind}: {', '.join(made.report.examples[kind])}")
        return made.layer

    def import_dir(self, path: Path, name: str | None = None, *, role: Role = "base") -> LayerInfo:
        """A layer of a directory's content."""
        return self.import_source(f"dir:{path}", name, role=role).layer

    def import_tar(
        self, path: Path, name: str | None = None, *, role: Role = "base", whiteouts: bool = False
    ) -> LayerInfo:
        """A layer of a tar archive (plain, gzip, xz or bzip2); `whiteouts`: its `.wh.` files hide what is below."""
        return self.import_source(f"tar:{path}", name, role=role, whiteouts=whiteouts).layer

    def name(self, ref: str, new: str) -> LayerInfo:
        """Another name for a layer. A tag moves; a version that means another layer is a Conflict."""
        layer = self.resolve(ref)
        self._catalog.add(_row(layer), _refs_for(new))
        return self.resolve(new)

    def remove(self, ref: str, in_use: Collection[str] = ()) -> None:
        """Forget the name, and the layer with its last name; by digest, all of it. Conflict while in use.

        `in_use` are the digests sandboxes run on; the file may be mounted even when none does, which is harmless:
        the kernel keeps a mounted file's blocks.
        """
        parsed = parse(ref)
        row = self._catalog.find(parsed)
        if row is None:
            raise self._missing(parsed, "layer")
        if parsed.kind != "digest" and self._catalog.count_names(row.digest) > 1:
            self._catalog.unname(parsed)
            return
        if row.digest in in_use:
            raise Conflict(
                f"layer {parsed} ({row.digest}) is used by a sandbox; stop it first",
                detail={"digest": row.digest},
            )
        with self._lock():
            self._catalog.remove(row.digest)
            self._path(row.digest).unlink(missing_ok=True)

    # -- sources ---------------------------------------------------------------------------------------------------

    def _from_dir(self, rest: str, job: _Job) -> _Made:
        path = Path(rest)
        if path.is_file():
            raise InvalidSpec.field("source", f"dir:{rest}", "a directory; this is a file: tar: takes an archive")
        if not path.is_absolute() or not path.is_dir():
            raise InvalidSpec.field("source", f"dir:{rest}", "an absolute path of a directory that is there")
        if path.resolve() in (self._dir.resolve(), *self._dir.resolve().parents):
            raise InvalidSpec.field("source", f"dir:{rest}", "a directory that does not hold the layer store")
        image, report = job.build(f"dir:{rest}", directory=str(path.resolve()))
        return _Made(image, report, Config(), None)

    def _from_tar(self, rest: str, job: _Job) -> _Made:
        path = Path(rest)
        if not path.is_absolute() or not path.is_file():
            raise InvalidSpec.field("source", f"tar:{rest}", "an absolute path of a tar archive that is there")
        with path.open("rb") as archive:
            image, report = job.build(f"tar:{rest}", archive_fd=archive.fileno())
        return _Made(image, report, Config(), None)

    def _from_image(self, rest: str, job: _Job) -> _Made:
        path = Path(rest)
        if not path.is_absolute() or not path.is_file():
            raise InvalidSpec.field("source", f"erofs:{rest}", "an absolute path of an EROFS image")
        image = job.staging / "layer.erofs"
        files.copy(path, image)
        with image.open("rb") as opened:
            opened.seek(EROFS_MAGIC_OFFSET)
            if opened.read(4) != EROFS_MAGIC or image.stat().st_size % BLOCK_BYTES:
                raise InvalidSpec.field("source", f"erofs:{rest}", "an EROFS image of whole 4096-byte blocks")
        return _Made(image, Report(), Config(), None)

    def _from_debootstrap(self, suite: str, job: _Job) -> _Made:
        recipe = debootstrap.Recipe(suite)
        archive = debootstrap.make(recipe, job.staging, job.progress, job.cancel)
        with archive.open("rb") as opened:
            archive.unlink()
            image, report = job.build(f"debootstrap:{suite}", archive_fd=opened.fileno())
        return _Made(image, report, Config(env=debootstrap.ENV, cwd="/", user="root"), recipe.source)

    def _adopt(self, rest: str, name: str | None) -> Imported:
        """A layer of another store on this machine, by a hard link where that works."""
        directory, _, ref = rest.partition("#")
        if not (Path(directory) / "layers/catalog.sqlite").is_file():
            raise InvalidSpec.field("source", f"store:{rest}", "store:/state/dir#ref of a store that is there")
        other = LayerStore(Path(directory))
        if not ref:
            raise InvalidSpec.field("source", f"store:{rest}", f"store:DIR#LAYER; {other.has()}")
        try:
            theirs = other.verify(ref)
        except NotFound as error:
            raise NotFound(f"no layer {ref} in the store {directory}; {other.has()}", detail=error.detail) from error
        refs = _refs_for(name or (ref if not ref.startswith("sha256:") else None))
        with self._staging() as staging:
            image = staging / "layer.erofs"
            files.copy(other._path(theirs.digest), image, link=True)
            layer, existed = self._publish(image, _row(theirs), refs, digest=theirs.digest)
        return Imported(layer, existed, Report())

    # -- files -----------------------------------------------------------------------------------------------------

    def _publish(
        self, image: Path, row: Row, refs: tuple[Ref, ...], digest: str | None = None
    ) -> tuple[LayerInfo, bool]:
        """The image becomes a layer: synced, renamed to its digest, then named. Whole or not at all."""
        if digest is None:
            with image.open("rb") as opened:
                os.fsync(opened.fileno())
            if os.geteuid() == 0:
                os.chown(image, 0, 0)
            image.chmod(0o444)
            digest = files.digest(image)
        size = image.stat().st_size
        target = self._path(digest)
        with self._lock():  # against remove() of the same content between rename and naming
            existed = target.is_file() and target.stat().st_size == size
            if not existed:
                image.rename(target)
                failpoint.at("layer.renamed")
                files.sync_dir(self._dir)
            self._catalog.add(msgspec.structs.replace(row, digest=digest, size=size), refs)
        failpoint.at("layer.named")
        return self.resolve(str(refs[0]) if refs else digest), existed

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """A directory for one import, on the store's file system, locked while it is worked in."""
        with self._lock():  # so that no sweep sees it between mkdir and flock
            path = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._dir))
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            failpoint.at("layer.staging")
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def _sweep(self) -> None:
        """What imports left that were killed, and files no name was written for."""
        with self._lock():
            known = {self._path(row.digest).name for row in self._catalog.all()}
            for path in self._dir.iterdir():
                if path.name.startswith(_STAGING):
                    files.remove_if_unlocked(path)
                elif path.name.startswith("sha256-") and path.name not in known:
                    path.unlink()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        handle = os.open(self._dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _path(self, digest: str) -> Path:
        return self._dir / _file_name(digest)


class _Made(msgspec.Struct):
    image: Path
    report: Report
    config: Config
    source: str | None


class _Job(msgspec.Struct):
    staging: Path
    whiteouts: bool
    progress: Progress | None
    cancel: threading.Event | None

    def build(self, what: str, *, directory: str | None = None, archive_fd: int = -1) -> tuple[Path, Report]:
        order = Order(
            mkfs=str(tools.mkfs_erofs()),
            options=image_options(whiteouts=self.whiteouts),
            directory=directory,
            archive_fd=archive_fd,
            whiteouts=self.whiteouts,
        )
        return build(self.staging, order, what=what, progress=self.progress, cancel=self.cancel)


def _row(layer: LayerInfo) -> Row:
    config = Config(layer.env, layer.cwd, layer.user)
    return Row(layer.digest, layer.size_bytes, layer.created_at, layer.role, layer.source or "", config)


def _file_name(digest: str) -> str:
    return f"{digest.replace(':', '-')}.erofs"


def _info(row: Row) -> LayerInfo:
    return LayerInfo(
        digest=row.digest,
        names=row.names,
        role=row.role,
        size_bytes=row.size,
        created_at=row.created,
        source=row.source,
        env=row.config.env,
        cwd=row.config.cwd,
        user=row.config.user,
    )


def _refs_for(name: str | None) -> tuple[Ref, ...]:
    if name is None:
        return ()
    ref = parse(name, "name")
    if ref.kind == "digest":
        raise InvalidSpec.field("name", name, "name:tag or name@version (a digest is not given, it results)")
    return (ref,)


def _translated(error: OSError, source: str) -> DsecError | OSError:
    if isinstance(error, DsecError):
        return error
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return InvalidSpec.field("source", source, f"a path that can be opened ({error.strerror})")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NodeDiskFull(f"importing {source}: the node's disk is full: {error}")
    return error
