"""A sandbox's files against a model, through sequences of calls that nobody thought of, deaths included."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import dsec
from tests.kit import filecalls
from tests.kit.filecalls import Call
from tests.kit.filemodel import TOP, Node, Outside, Refused, Seen, Tree, content_of
from tests.kit.home import BASE, Home
from tests.kit.machines import run_machine
from tests.kit.rtclient import Client
from tests.kit.watching import Watching
from tests.root.test_sdk_files import of_host

pytestmark = [pytest.mark.same_everywhere, pytest.mark.timeout(6 * 3600)]

WORKSPACE = "model:1"
# All but content, NUL after each field.
SEEN = rf"find /{TOP.decode()} -printf '%P\0%y\0%m\0%s\0%T@\0%l\0'"
HASHES = f"find /{TOP.decode()} -type f -exec sha256sum -z {{}} +"
KINDS = {b"f": "file", b"d": "directory", b"l": "symlink", b"p": "fifo"}
DELAYS_S = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.02)
RANDOM = st.randoms(use_true_random=True)
# An agent takes a second to come back.
VICTIMS = ("helper",) * 6 + ("runtime",) * 5 + ("agent",)
CALLS_MAX = 8


def layer() -> Node:
    """What the sandbox's own files are put over."""
    deep = Node("directory", 0o755, names={b"c": Node("file", 0o644, b"deep"), b"\xff\xfe": Node("file", 0o600, b"x")})
    names = {
        b"a": Node("directory", 0o700, names={b"a": deep, b"b": Node("file", 0o755, b"of the layer" * 1000)}),
        b"b": Node("file", 0o644, b""),
        b"c": Node("symlink", 0o777, b"a/a"),
        b"x" * 255: Node("file", 0o4755, b"long"),
        b"new\nline": Node("directory", 0o1777),
    }
    return Node("directory", 0o755, names=names)


class FilesMachine(RuleBasedStateMachine):
    """One sandbox and what should be in it."""

    home: ClassVar[Home]
    # What was done, to be told at the end.
    done: ClassVar[Counter[str]]

    @initialize()
    def begin(self) -> None:
        self.client = self.home.client()
        self.sbx = self.client.create(
            base=BASE, workspace=WORKSPACE, cwd="/" + TOP.decode(), disk_mib=64, idle_timeout_s=None
        )
        self.tree = Tree(layer())
        self.known: dict[str, bytes] = {}
        self.first = self.seen()
        self.adopt(self.first)
        self.watching = Watching(self.sbx)
        self.called: list[Call] = []

    def teardown(self) -> None:
        if not hasattr(self, "sbx"):
            return
        try:
            self.same_from_outside()
            self.differs_from_its_layers_as_it_should()
        finally:
            self.watching.stop()
            self.sbx.stop(grace_s=0)
            self.client.close()

    # What is there, by somebody else's word

    def seen(self) -> dict[bytes, Seen]:
        listed, hashed = self.sbx.run(SEEN, check=True), self.sbx.run(HASHES, check=True)
        assert not listed.truncated
        fields = listed.stdout_bytes.split(b"\0")[:-1]
        top = len(TOP) + 2
        hashes = {line[66 + top :]: line[:64].decode() for line in hashed.stdout_bytes.split(b"\0") if line}
        found = {}
        for path, kind, mode, _, mtime, target in zip(*(fields[n::6] for n in range(6)), strict=True):
            name = KINDS[kind]
            content = hashes[path] if name == "file" else content_of(name, target)
            found[path] = Seen(name, int(mode, 8), content, float(mtime) if name in ("file", "symlink") else None)
        return found

    def adopt(self, observed: dict[bytes, Seen]) -> None:
        """The model becomes what is there: kinds, modes and contents are known, times only by looking."""
        known = {content_of(node.kind, node.data): node.data for _, node in self.tree.walk()} | self.known
        top = Node("directory", observed[b""].mode)
        for path, seen in sorted(observed.items()):
            if not path:
                continue
            parent, name = path.rpartition(b"/")[::2]
            at = top
            for part in parent.split(b"/") if parent else ():
                at = at.names[part]
            data = bytes.fromhex(seen.content) if seen.kind == "symlink" else known[seen.content]
            at.names[name] = Node(seen.kind, seen.mode, data, seen.mtime)  # type: ignore[arg-type]  # one of KINDS
        self.tree = Tree(top)

    @rule()
    def same_from_outside(self) -> None:
        observed, wanted = self.seen(), self.tree.flat()
        wrong = {
            path: (wanted.get(path), observed.get(path))
            for path in wanted.keys() | observed.keys()
            if path not in wanted or path not in observed or not wanted[path].fits(observed[path])
        }
        assert not wrong, wrong

    def differs_from_its_layers_as_it_should(self) -> None:
        last, wanted = self.seen(), {}
        for path in self.first.keys() | last.keys():
            old, new = self.first.get(path), last.get(path)
            if old is None or new is None:
                wanted[path] = "added" if old is None else "deleted"
            elif old.kind != new.kind:
                wanted[path] = "type"
            elif old != new:
                parts = (("content", old.content, new.content), ("mode", old.mode, new.mode))
                wanted[path] = " ".join(name for name, one, other in parts if one != other)
                if old.mtime != new.mtime:
                    wanted[path] = f"{wanted[path]} mtime".strip()
        top = len(TOP) + 2
        told = {
            os.fsencode(change.path)[top:]: " ".join(change.what) if change.kind == "changed" else change.kind
            for change in self.sbx.diff("/" + TOP.decode())
        }
        assert told == wanted

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What changes meanwhile is told to who watches."""
        before, mark = self.tree.flat(), self.watching.mark()
        self.called = []
        yield
        after = self.tree.flat()
        untold = self.watching.missing(before, after, mark)
        changes = [(path, before.get(path), after.get(path)) for path in untold]
        # In full, which the assertion's own message is not.
        print(*(("not told of", changes, self.watching.since(mark), self.called) if untold else ()), sep="\n", end="")
        assert not untold, (untold, self.watching.broken)

    # Calls

    @rule(rnd=RANDOM)
    def calls(self, rnd: random.Random) -> None:
        with self.watched():
            for _ in range(rnd.randrange(1, CALLS_MAX)):
                self.call(rnd)

    def call(self, rnd: random.Random) -> None:
        call = filecalls.some_call(rnd, self.tree)
        after = self.tree.copy()
        with contextlib.suppress(Outside):
            self.hold(call, *self.predicted(call, after), self.outcome(call))
            self.tree = after

    @staticmethod
    def predicted(call: Call, tree: Tree) -> tuple[object, Refused | None]:
        try:
            return call.model(tree), None
        except Refused as refused:
            return None, refused

    def outcome(self, call: Call) -> object:
        self.called.append(call)
        try:
            return call.do(self.sbx.files)
        except dsec.DsecError as error:
            return error

    def hold(self, call: Call, wanted: object, refused: Refused | None, got: object) -> None:
        self.done[f"{call.name}: {getattr(refused, 'errno', '') or getattr(refused, 'kind', 'done')}"] += 1
        if isinstance(got, dsec.DsecError):
            assert filecalls.is_answer(call, refused, got), (call, refused, wanted, got, got.detail)
        else:
            assert refused is None, (call, refused, got)
            filecalls.check_answer(call, wanted, got)

    @rule(rnd=RANDOM)
    def put(self, rnd: random.Random) -> None:
        """What no call makes."""
        before, mark = self.tree.flat(), self.watching.mark()
        # A slash behind it is a directory's.
        path, fifo = filecalls.some_path(rnd, self.tree).rstrip(b"/"), rnd.random() < 0.25
        node = Node("fifo", 0o644) if fifo else Node("symlink", 0o777, filecalls.some_target(rnd, self.tree))
        try:
            self.tree.put(path, node)
        except (Refused, Outside):
            return
        make = ["mkfifo", "--", path] if fifo else ["ln", "-sT", "--", node.data, path]
        self.sbx.run(make, check=True)
        untold = self.watching.missing(before, self.tree.flat(), mark)
        assert not untold, (untold, self.watching.since(mark))

    @rule(rnd=RANDOM)
    def upload(self, rnd: random.Random) -> None:
        path, tree = filecalls.some_path(rnd, self.tree), filecalls.some_tree(rnd)
        after = self.tree.copy()
        with self.watched(), tempfile.TemporaryDirectory() as here, contextlib.suppress(Outside):
            filecalls.local(Path(here) / "top", tree)
            _, refused = self.predicted(Call("unpack", {"path": path, "tree": tree}), after)
            try:
                report = self.sbx.files.upload(Path(here) / "top", path)
            except dsec.DsecError as error:
                self.hold(Call("unpack", {"path": path}), None, refused, error)
            else:
                assert refused is None, refused
                assert report.bytes == sum(node.size for _, node in Tree(tree).walk() if node.kind == "file")
                assert report.skipped.count == 0
            self.tree = after

    @rule(rnd=RANDOM)
    def download(self, rnd: random.Random) -> None:
        path = filecalls.some_path(rnd, self.tree)
        with tempfile.TemporaryDirectory() as here, contextlib.suppress(Outside):
            to = Path(here) / "to"
            wanted, refused = self.predicted(Call("stat", {"path": path}), self.tree)
            if isinstance(wanted, Node) and wanted.kind not in ("file", "directory"):
                refused = Refused(kind=wanted.kind)
            try:
                report = self.sbx.files.download(path, to)
            except dsec.DsecError as error:
                self.hold(Call("stat", {"path": path}), wanted, refused, error)
                assert not list(Path(here).iterdir())
                return
            assert refused is None, refused
            assert isinstance(wanted, Node)
            if wanted.kind == "file":
                assert to.read_bytes() == wanted.data
                return
            files, left_out = filecalls.downloaded(wanted)
            assert filecalls.of_local(to) == files
            assert report.skipped.count == left_out

    # Deaths

    @rule(rnd=RANDOM)
    def dies(self, rnd: random.Random) -> None:
        """Nothing that was told done is missing, or comes twice."""
        if rnd.random() < 0.3:
            self.killers()[rnd.choice(VICTIMS)]()

    @rule(rnd=RANDOM, victim=st.sampled_from(VICTIMS), delay=st.sampled_from(DELAYS_S))
    def dies_meanwhile(self, rnd: random.Random, victim: str, delay: float) -> None:
        """A call is done, or not, or its caller is told that nobody knows; then it is one of both."""
        call = filecalls.some_call(rnd, self.tree, changing=True)
        before, after = self.tree, self.tree.copy()
        try:
            wanted, refused = self.predicted(call, after)
        except Outside:
            return

        def kill() -> None:
            time.sleep(delay)
            self.killers()[victim]()

        with self.watched():
            self.settle_meanwhile(call, victim, kill, before, after, wanted, refused)

    def settle_meanwhile(
        self,
        call: Call,
        victim: str,
        kill: Callable[[], None],
        before: Tree,
        after: Tree,
        wanted: object,
        refused: Refused | None,
    ) -> None:
        killer = threading.Thread(target=kill)
        killer.start()
        got = self.outcome(call)
        killer.join()
        self.done[f"{victim} killed meanwhile: {getattr(got, 'code', 'done')}"] += 1
        if isinstance(got, dsec.Unknown | dsec.Unavailable):
            observed = self.seen()
            assert filecalls.settle(call, before, after, observed), (call, victim, got, got.detail)
            self.known |= {content_of(n.kind, n.data): n.data for tree in (before, after) for _, n in tree.walk()}
            self.adopt(observed)
        else:
            self.hold(call, wanted, refused, got)
            self.tree = after

    def killers(self) -> dict[str, Callable[[], None]]:
        return {"helper": self.kill_helpers, "runtime": self.kill_runtime, "agent": self.kill_agent}

    def kill_helpers(self) -> None:
        killed = set(of_host(self.sbx))
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # One that is still dying may be asked, and that call is cut short.
        while killed & set(of_host(self.sbx)):
            time.sleep(0.005)

    def kill_runtime(self) -> None:
        with Client(self.home.place.run_dir / "runtime.sock") as runtime:
            os.kill(runtime.hello["pid"], signal.SIGKILL)

    def kill_agent(self) -> None:
        os.kill(self.home.agent(), signal.SIGKILL)
        self.home.dsec("up")


@pytest.fixture
def layered(home: Home) -> Iterator[Home]:
    """The node, with the layer that examples begin with."""
    source = Path(tempfile.mkdtemp(prefix="model-layer-"))
    try:
        filecalls.local(source, Node("directory", 0o755, names={TOP: layer()}))
        with home.client() as client:
            client.layers.import_(f"dir:{source}", WORKSPACE, role="workspace")
        yield home
    finally:
        shutil.rmtree(source)


def test_files_are_what_a_model_of_them_says(layered: Home) -> None:
    done: Counter[str] = Counter()
    machine = type("FilesMachine", (FilesMachine,), {"home": layered, "done": done})
    run_machine(machine, examples=3, steps=40)
    print(*(f"{count:7} {what}" for what, count in sorted(done.items())), sep="\n")
