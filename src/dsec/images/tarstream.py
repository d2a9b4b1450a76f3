"""Tar at the level of bytes: a reader for ustar, GNU and pax archives and a writer of one normal form.

Not `tarfile`: names and extended attributes are bytes here and stay so, an archive's sparse files are read in
every form GNU tar writes them, nothing is ever opened by name, and what is malformed is refused instead of guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

BLOCK: Final = 512
ZEROS: Final = bytes(BLOCK)
CHUNK_BYTES: Final = 256 * 1024
# A pax header holds the extended attributes of one file: the kernel allows 64 KiB for each value.
PAX_MAX_BYTES: Final = 4 * 1024 * 1024
LONG_NAME_MAX_BYTES: Final = 64 * 1024
SPARSE_MAX_SEGMENTS: Final = 1_000_000

REGULAR: Final = b"0"
HARDLINK: Final = b"1"
SYMLINK: Final = b"2"
CHARDEV: Final = b"3"
BLOCKDEV: Final = b"4"
DIRECTORY: Final = b"5"
FIFO: Final = b"6"
_TYPES: Final = (REGULAR, HARDLINK, SYMLINK, CHARDEV, BLOCKDEV, DIRECTORY, FIFO)

_XATTR: Final = b"SCHILY.xattr."


class TarError(ValueError):
    """The archive is not one we accept; the message says what and where."""


class Entry(msgspec.Struct):
    """One member. `size` is what a reader of the file sees; `segments` are its data, in order."""

    name: bytes
    type: bytes
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    link: bytes = b""
    device: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = {}
    segments: list[tuple[int, int]] | None = None  # (offset, length); None: one, the whole file


class Reader:
    """Entries of an archive, one after the other; after each, `data()` gives its content with holes as zeros."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._left = 0  # bytes of the current member still in the stream
        self._padding = 0
        self._entry: Entry | None = None
        self._globals: dict[bytes, bytes] = {}
        self.offset = 0

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self._next()) is not None:
            yield entry
        while self._source.read(CHUNK_BYTES):  # so that a decompressor or a writer is not cut off
            pass

    def data(self) -> Iterator[bytes]:
        """The current entry's content; may be called once."""
        entry = self._entry
        assert entry is not None
        if entry.segments is None:
            yield from self._take(entry.size)
            return
        position = 0
        for offset, length in entry.segments:
            yield from _zeros(offset - position)
            yield from self._take(length)
            position = offset + length
        yield from _zeros(entry.size - position)

    def _next(self) -> Entry | None:
        self._skip()
        pax: dict[bytes, bytes] = {}
        long: dict[bytes, bytes] = {}
        while True:
            header = self._exactly(BLOCK, "a header")
            if header == ZEROS:
                return None
            _check_sum(header, self.offset - BLOCK)
            kind, size = header[156:157], _number(header[124:136], "size")
            if kind in (b"x", b"X", b"g"):
                (self._globals if kind == b"g" else pax).update(_pax(self._body(size, PAX_MAX_BYTES)))
            elif kind in (b"L", b"K"):
                long[kind] = self._body(size, LONG_NAME_MAX_BYTES).rstrip(b"\0")
            else:
                return self._member(header, self._globals | pax, long)

    def _member(self, header: bytes, pax: dict[bytes, bytes], long: dict[bytes, bytes]) -> Entry:
        kind = header[156:157]
        name = pax.get(b"GNU.sparse.name") or pax.get(b"path") or long.get(b"L") or _ustar_name(header)
        if kind in (b"\0", b"7", b"S"):
            kind = DIRECTORY if kind == b"\0" and name.endswith(b"/") else REGULAR
        if kind not in _TYPES:
            raise TarError(f"member {_show(name)} has type {kind!r}, which is not supported")
        stored = _integer(pax, b"size", _number(header[124:136], "size"))
        if stored < 0:
            raise TarError(f"member {_show(name)} has a negative size")
        entry = Entry(
            name=name,
            type=kind,
            mode=_number(header[100:108], "mode") & 0o7777,
            uid=_integer(pax, b"uid", _number(header[108:116], "uid")),
            gid=_integer(pax, b"gid", _number(header[116:124], "gid")),
            mtime_ns=_mtime(pax, header),
            size=stored if kind == REGULAR else 0,
            link=pax.get(b"linkpath") or long.get(b"K") or _text(header[157:257]),
            device=_device(header, kind),
            xattrs={k[len(_XATTR) :]: v for k, v in pax.items() if k.startswith(_XATTR)},
        )
        # Some writers give a hard link or a directory a size, but no data follows it.
        self._left = stored if kind == REGULAR else 0
        self._padding = -self._left % BLOCK
        self._entry = entry
        if header[156:157] == b"S":
            self._old_sparse(header, entry)
        elif any(key.startswith(b"GNU.sparse.") for key in pax):
            self._pax_sparse(pax, entry)
        return entry

    def _old_sparse(self, header: bytes, entry: Entry) -> None:
        table, more = header[386:482], header[482]
        entry.size = _number(header[483:495], "real size")
        segments = _old_table(table)
        while more:
            block = self._exactly(BLOCK, "a sparse table")
            segments += _old_table(block[:504])
            more = block[504]
            if len(segments) > SPARSE_MAX_SEGMENTS:
                raise TarError(f"{_show(entry.name)}: more than {SPARSE_MAX_SEGMENTS} sparse segments")
        entry.segments = _checked(segments, entry, self._left)

    def _pax_sparse(self, pax: dict[bytes, bytes], entry: Entry) -> None:
        entry.size = _integer(pax, b"GNU.sparse.realsize", _integer(pax, b"GNU.sparse.size", entry.size))
        if pax.get(b"GNU.sparse.major") == b"1":
            segments = self._table_in_data(entry)
        elif b"GNU.sparse.map" in pax:
            numbers = [_decimal(n) for n in pax[b"GNU.sparse.map"].split(b",") if n]
            segments = list(zip(numbers[::2], numbers[1::2], strict=False))
        else:
            raise TarError(f"{_show(entry.name)}: this form of sparse file (pax 0.0) is not supported")
        entry.segments = _checked(segments, entry, self._left)

    def _table_in_data(self, entry: Entry) -> list[tuple[int, int]]:
        """Version 1.0: the table stands before the data, as decimal lines, padded to a block."""
        buffer = bytearray()
        numbers: list[int] = []
        while not numbers or len(numbers) < 1 + 2 * numbers[0]:
            cut = buffer.find(b"\n")
            if cut < 0:
                if self._left < BLOCK:
                    raise TarError(f"{_show(entry.name)}: its sparse table is cut off")
                buffer += self._exactly(BLOCK, "a sparse table")
                self._left -= BLOCK
                continue
            numbers.append(_decimal(bytes(buffer[:cut])))
            del buffer[: cut + 1]
            if numbers[0] > SPARSE_MAX_SEGMENTS:
                raise TarError(f"{_show(entry.name)}: more than {SPARSE_MAX_SEGMENTS} sparse segments")
        return list(zip(numbers[1::2], numbers[2::2], strict=True))

    def _body(self, size: int, most: int) -> bytes:
        if not 0 <= size <= most:
            raise TarError(f"an extended header of {size} bytes at byte {self.offset}; at most {most}")
        body = self._exactly(size + -size % BLOCK, "an extended header")
        return body[:size]

    def _take(self, length: int) -> Iterator[bytes]:
        while length:
            chunk = self._exactly(min(length, CHUNK_BYTES), "a file")
            length -= len(chunk)
            self._left -= len(chunk)
            yield chunk

    def _skip(self) -> None:
        for _ in self._take(self._left):
            pass
        self._exactly(self._padding, "padding")
        self._padding = 0

    def _exactly(self, count: int, what: str) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self._source.read(count)
            if not part:
                raise TarError(f"the archive ends at byte {self.offset}, in the middle of {what}")
            self.offset += len(part)
            count -= len(part)
            parts.append(part)
        return b"".join(parts)


class Writer:
    """Writes entries in one form: ustar, with a pax header only where ustar cannot say it."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def add(self, entry: Entry, data: Iterator[bytes] | None = None) -> None:
        """One member. `data` must give exactly `entry.size` bytes."""
        pax = _needed_pax(entry)
        if pax:
            body = b"".join(_record(key, value) for key, value in sorted(pax.items()))
            self._sink.write(_header(Entry(b"pax", b"x", size=len(body))))
            self._sink.write(body + bytes(-len(body) % BLOCK))
        self._sink.write(_header(entry))
        written = 0
        for chunk in data or ():
            self._sink.write(chunk)
            written += len(chunk)
        if written != entry.size:
            raise TarError(f"{_show(entry.name)}: {written} bytes came for {entry.size}")
        self._sink.write(bytes(-written % BLOCK))

    def close(self) -> None:
        """The end mark."""
        self._sink.write(ZEROS * 2)
        self._sink.flush()


def show(name: bytes) -> str:
    """A name for a message: escaped and shortened."""
    return _show(name)


def _show(name: bytes) -> str:
    text = repr(name)[1:]
    return text if len(text) <= 120 else text[:117] + "..."


def _zeros(count: int) -> Iterator[bytes]:
    block = bytes(min(max(count, 0), CHUNK_BYTES))
    while count > 0:
        yield block[:count] if count < len(block) else block
        count -= len(block)


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _ustar_name(header: bytes) -> bytes:
    name, prefix = _text(header[0:100]), b""
    if header[257:263] == b"ustar\0":  # GNU's old magic keeps times in the place of the prefix
        prefix = _text(header[345:500])
    return prefix + b"/" + name if prefix else name


def _number(field: bytes, what: str) -> int:
    if field[0] & 0x80:  # base 256, two's complement
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise TarError(f"a header's {what} is not a number: {field!r}") from None


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise TarError(f"not a number: {_show(text)}")
    return int(text)


def _integer(pax: dict[bytes, bytes], key: bytes, default: int) -> int:
    return _decimal(pax[key]) if key in pax else default


def _mtime(pax: dict[bytes, bytes], header: bytes) -> int:
    if b"mtime" not in pax:
        return _number(header[136:148], "mtime") * 10**9
    whole, _, fraction = pax[b"mtime"].partition(b".")
    negative = whole.startswith(b"-")
    value = _decimal(whole.lstrip(b"-") or b"0") * 10**9 + _decimal((fraction + b"0" * 9)[:9])
    return -value if negative else value


def _device(header: bytes, kind: bytes) -> tuple[int, int]:
    if kind not in (CHARDEV, BLOCKDEV):
        return (0, 0)
    return _number(header[329:337], "major"), _number(header[337:345], "minor")


def _check_sum(header: bytes, offset: int) -> None:
    expected = _number(header[148:156], "checksum")
    if sum(header) - sum(header[148:156]) + 8 * 32 != expected:
        raise TarError(f"not a tar archive, or damaged: wrong checksum at byte {offset}")


def _pax(body: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(body):
        space = body.find(b" ", position, position + 12)
        length = _decimal(body[position:space]) if space > 0 else 0
        if position + length <= space or space < 0:  # it would be read for ever
            raise TarError("a damaged pax header")
        record = body[space + 1 : position + length]
        key, found, value = record[:-1].partition(b"=")
        if not found or record[-1:] != b"\n" or position + length > len(body):
            raise TarError("a damaged pax header")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            key = b"GNU.sparse.0.0"  # repeated keys: only that they occur matters, it is refused
        records[key] = value
        position += length
    return records


def _old_table(table: bytes) -> list[tuple[int, int]]:
    found = []
    for at in range(0, len(table) - 23, 24):
        if table[at + 12] == 0:
            break
        found.append((_number(table[at : at + 12], "offset"), _number(table[at + 12 : at + 24], "length")))
    return found


def _checked(segments: list[tuple[int, int]], entry: Entry, stored: int) -> list[tuple[int, int]]:
    position = total = 0
    for offset, length in segments:
        if offset < position or length < 0 or offset + length > entry.size:
            raise TarError(f"{_show(entry.name)}: its sparse segments overlap or lie outside")
        position, total = offset + length, total + length
    if total != stored:
        raise TarError(f"{_show(entry.name)}: its sparse table speaks of {total} bytes, {stored} are there")
    return segments


def _needed_pax(entry: Entry) -> dict[bytes, bytes]:
    pax = {_XATTR + key: value for key, value in entry.xattrs.items()}
    seconds, nanoseconds = divmod(entry.mtime_ns, 10**9)
    if seconds < 0:  # a fraction would count backwards in a decimal number, forwards in mkfs.erofs
        nanoseconds = 0
    if nanoseconds or not 0 <= seconds < 8**11:
        # Nine digits always: mkfs.erofs reads the digits after the point as a whole number of nanoseconds.
        pax[b"mtime"] = b"%d.%09d" % (seconds, nanoseconds)
    if len(entry.name) > 99:
        pax[b"path"] = entry.name
    if len(entry.link) > 100:
        pax[b"linkpath"] = entry.link
    for key, value, most in ((b"uid", entry.uid, 8**7), (b"gid", entry.gid, 8**7), (b"size", entry.size, 8**11)):
        if value >= most:
            pax[key] = b"%d" % value
    return pax


def _record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    if len(str(length)) != len(str(len(rest))):
        length += 1
    return b"%d" % length + rest


def _header(entry: Entry) -> bytes:
    def octal(value: int, width: int) -> bytes:
        return b"%0*o\0" % (width - 1, value if 0 <= value < 8 ** (width - 1) else 0)

    # The root has a name: mkfs.erofs dies of a bare "/".
    name = (entry.name or b".") + b"/" if entry.type == DIRECTORY else entry.name
    fields = [
        name[:100].ljust(100, b"\0"),
        octal(entry.mode, 8),
        octal(entry.uid, 8),
        octal(entry.gid, 8),
        octal(entry.size, 12),
        octal(entry.mtime_ns // 10**9, 12),
        b" " * 8,
        entry.type,
        entry.link[:100].ljust(100, b"\0"),
        b"ustar\x0000",
        bytes(64),
        octal(entry.device[0], 8),
        octal(entry.device[1], 8),
    ]
    header = bytearray(b"".join(fields).ljust(BLOCK, b"\0"))
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)
