"""Every limit of the public surface, in one place, with its unit in its name."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

NAME_MAX_CHARS: Final = 128
LABELS_MAX: Final = 64
LABEL_KEY_MAX_CHARS: Final = 64
LABEL_VALUE_MAX_CHARS: Final = 256
ENV_MAX_ENTRIES: Final = 1024
NETWORK_RULES_MAX: Final = 256  # of one part of a policy
NETWORK_TARGET_MAX_CHARS: Final = 255  # a wildcard before the longest name of a host that there is
NETWORK_PORTS_MAX: Final = 16  # numbers and ranges of one rule
NETWORK_PHASES_MAX: Final = 16
# References to images and snapshots, which their registries check further.
SOURCE_MAX_CHARS: Final = 1024

# What the kernel takes: MAX_ARG_STRLEN for one string; a quarter of the stack limit (8 MiB) for all.
ARG_MAX_BYTES: Final = 128 * KIB - 1
ARGS_MAX_BYTES: Final = 2 * MIB - 64 * KIB
PATH_MAX_BYTES: Final = 4095

# The runtime takes it in one frame (FRAME_MAX_BYTES) together with arguments and environment.
STDIN_MAX_BYTES: Final = 4 * MIB
# The start and the end of each output stream that a buffered run keeps.
OUTPUT_HEAD_BYTES: Final = 1 * MIB
OUTPUT_TAIL_BYTES: Final = 1 * MIB
# What a streaming reader may be behind by before the program has to wait for it.
STREAM_WINDOW_BYTES: Final = 1 * MIB

CPU_MIN: Final = 0.01
CPU_MAX: Final = 1024.0
MEMORY_MIN_MIB: Final = 16
MEMORY_MAX_MIB: Final = 16 * 1024 * 1024
DISK_MIN_MIB: Final = 16
DISK_MAX_MIB: Final = 16 * 1024 * 1024
PIDS_MIN: Final = 4
PIDS_MAX: Final = 1_000_000
PIDS_DEFAULT: Final = 4096

CPU_DEFAULT: Final = 1.0
MEMORY_DEFAULT_MIB: Final = 512
DISK_DEFAULT_MIB: Final = 1024
SHM_DEFAULT_BYTES: Final = 64 * MIB
NOFILE_DEFAULT: Final = 65_536
PTY_MAX: Final = 256

IDLE_TIMEOUT_DEFAULT_S: Final = 3600.0
LIFETIME_DEFAULT_S: Final = 86_400.0
LIFETIME_MAX_S: Final = 30 * 86_400.0
TIMEOUT_MAX_S: Final = 30 * 86_400.0
WAIT_MAX_S: Final = 86_400.0
GRACE_DEFAULT_S: Final = 2.0
GRACE_MAX_S: Final = 600.0

CREATE_MANY_MAX: Final = 40_000
LAYERS_MAX: Final = 64
LIST_PAGE_DEFAULT: Final = 1000
LIST_PAGE_MAX: Final = 10_000
REQUEST_MAX_BYTES: Final = 32 * MIB
DIFF_MAX: Final = 1_000_000  # changes that one call tells
# File calls of one sandbox at the same time; each is served by a process of that sandbox. More wait.
FILE_CALLS_MAX: Final = 16
KEY_MAX_CHARS: Final = 128
FRAME_MAX_BYTES: Final = 8 * MIB

TERMINAL_MAX: Final = 4096  # rows and columns
SPOOL_BYTES: Final = 16 * MIB  # newest output of each stream of a spawned program that stays readable, unless it says
SPOOL_MAX_BYTES: Final = 1024 * MIB  # it may say so much
LINE_MAX_BYTES: Final = 1 * MIB  # of a line that the SDK gives in one piece
INPUT_PIECE_MAX_BYTES: Final = 1 * MIB  # of one call that gives a program input
PROGRAMS_KEPT: Final = 64  # ended programs of a sandbox whose output is kept
SESSIONS_MAX: Final = 256  # alive in a sandbox
COMMAND_TEXT_MAX_BYTES: Final = 4 * MIB  # of one command of a session
COMMANDS_WAITING_MAX: Final = 1024  # of one session
