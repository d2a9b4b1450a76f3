"""What a session's shell is given for a command, and how the end of one is told from what it writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal

from dsec.model.processes import quoted

# The signal at which a shell gives up the text it is at. SIGSTKFLT: no kernel sends it, and nobody uses it.
GIVE_UP: Final = 16
_CONTROL_LINE_MAX: Final = 4096
# What a command needs of its shell: what it reads could not be opened; there is no descriptor left to read the text by.
Lack = Literal["stdin", "descriptors"]
_LACKS: Final[dict[bytes, Lack]] = {b"-": "stdin", b"!": "descriptors"}
_STATUS: Final = re.compile(rb"(\d{1,12}) (\d{1,3}|[-+!])\Z")

# What the shell does when a command is cut: it leaves the text, whatever is left of it, and lives on. bash returns from
# what it has been told to read, at once and wherever it is: within a substitution, behind a subshell. From within a
# function, or another file, it returns having sent itself the signal once more, which it minds on the way out, before
# anything else (sent by the handler itself it would be minded there, for ever). Other shells fail at a special
# built-in, which ends the text up to the `command` before `eval`: descriptor 3 is closed within a command, and open
# between two, where a signal that comes too late does nothing.
_TOLD: Final = b"/proc/self/fd/61"  # what bash is told to read: no program's descriptor, out of the way of bash's own
_IN_BASH: Final = (
    b"case ${#BASH_SOURCE[@]}$BASH_SOURCE in 0) break 999;; 1%s) return;; *) return $(\\command kill -%d $$);; esac"
) % (_TOLD, GIVE_UP)
_ON_SIGNAL: Final = (b"{ case ${BASH_VERSION+x} in x) \\command eval %s;; *) : >&3;; esac; } 2>&-") % quoted(
    _IN_BASH
)  # others would not even read it


def script(text: bytes, number: int, last: int, stdin: str | None, *, first: bool) -> bytes:
    """What a shell is given for a command.

    `eval` keeps a syntax error to the command; `command` keeps the shell alive where an error of a special built-in
    would end it. No braces: bash 5.2 takes them for words after a text whose quotes were open. `.` is what a cut text
    is left by in bash; what it reads is small enough for a pipe. Before 5.1 it made a file of it, which needs a disk:
    there it is a loop, which a text is left by as soon as a command of it has ended. The text itself is in a variable
    until it is begun. It is given the `$?` of the command before; what stands before `&&` ends no shell and sets off no
    trap. The answer has a line of its own, whatever else was written there.

    Lines are counted from the text's first one: in bash by LINENO, which an expansion of a group's redirection sets for
    what is read after it (a command's own is put back with it); it would show what stands before the text on its line
    if that has a syntax error. Others do not, and count from where `eval` begins (dash), or from the session's begin.

    What a command reads lies where programs can remove it, /dev/null too. `eval` would answer 1 without having read a
    word of the command: so it is tried before, and said. So is the descriptor that bash reads by, which a limit of the
    shell's own may not leave it. The first command says when the signal may come: before, it
    would end the shell.
    """
    source = quoted((stdin or "/dev/null").encode())
    trap = b"\\command trap %s %d\n" % (quoted(_ON_SIGNAL), GIVE_UP)
    trap += b"\\command printf '\\n%%d +\\n' %d >&3\n" % number if first else b""
    tried = b"\\command : <%s || \\command printf '\\n%%d -\\n' %d >&3\n" % (source, number)
    before = b"(\\command exit %d) && :; " % last if last else b""
    held = b"\\command : 61<&0 || \\command printf '\\n%%d !\\n' %d >&3" % number
    elsewhere = b'\\command eval "\\command unset -v _dsec; %s${BASH_VERSION+\n}$_dsec"' % before
    in_bash = b'\\command eval "{ \\command unset -v _dsec; } <&\\$((LINENO=0,0)); %s\n$_dsec"' % before
    given = b"""_dsec=%s
case ${BASH_VERSION-5.0.} in
[1-4].* | 5.0.*) for _ in _; do %s <%s 3>&-; done;;
*) %s; \\command . %s <%s 3>&- 61<<'%d'
%s 61<&-
%d
;; esac
""" % (quoted(text + b"\n"), elsewhere, source, held, _TOLD, source, number, in_bash, number)
    return trap + tried + given + answer_line(number)


def answer_line(number: int) -> bytes:
    """The line that makes a shell say what it answered last."""
    return b"\\command printf '\\n%%d %%d\\n' %d \"$?\" >&3\n" % number


def border_behind(number: int) -> bytes:
    """What a shell is given behind a text that was cut: the line of its answer, and before it what spares the next text
    bash's word about jobs that were killed, which it would give with the next program it waits for.
    """
    return b"\\command jobs >&- 2>&-\n" + answer_line(number)


class Border:
    """Finds the line on the control stream that ends a command. What else comes there is not believed."""

    def __init__(self, number: int, on_begun: Callable[[], None] = lambda: None) -> None:
        self._number = b"%d" % number
        self._on_begun = on_begun
        self._line = b""
        self.answer: int | None = None
        self.end = 0
        self._lacks: Lack | None = None

    @property
    def not_begun(self) -> Lack | None:
        """What the shell could not have, if it did not begin the command for it."""
        return self._lacks if self.answer else None

    def feed(self, offset: int, data: bytes) -> bool:
        """Whether the command has ended."""
        for at, byte in enumerate(data):
            if byte != 0x0A:
                self._line = (self._line + data[at : at + 1])[-_CONTROL_LINE_MAX:]
                continue
            found = _STATUS.match(self._line)
            self._line = b""
            if found is None or found[1] != self._number:
                continue
            if found[2] == b"+":
                self._on_begun()
            elif found[2] in _LACKS:
                self._lacks = _LACKS[found[2]]
            else:
                self.answer, self.end = int(found[2]) & 0xFF, offset + at + 1
                return True
        return False
