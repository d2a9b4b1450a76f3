"""Attributes that callers try, and ours for the same: for messages, so nothing here is looked at before one is wrong.

Docker's, E2B's, Modal's and Daytona's libraries, subprocess, asyncio, pexpect and pathlib have them. `words` has those
of arguments.
"""

from __future__ import annotations

from typing import Final

# Ours, what is said of it, and the names that are tried for it.
Row = tuple[str, str, str]

_CLIENT: Final[tuple[Row, ...]] = (
    ("create", "create(...), get(ref), list()", "containers sandboxes sandbox images"),
    ("create", "create(...) makes a sandbox: its run(...) runs a program", "run exec exec_run execute commands spawn"),
    ("create", "create(...) makes one", "new start launch create_sandbox new_sandbox start_sandbox run_container"),
    ("create_many", "create_many(n, ...) makes several", "create_batch map scale create_all"),
    ("get", "get(ref): an id or a name", "connect get_sandbox find find_one attach from_id from_name lookup resume"),
    ("list", "list() gives those that are alive", "ls list_sandboxes all find_all search get_all list_all ps"),
    (
        "get",
        "get(ref).stop() ends one, job(name).stop() all of a job",
        "stop delete remove kill terminate destroy delete_sandbox stop_all kill_all prune rm",
    ),
    ("node", "node() answers where a node does", "ping info version health status is_alive df healthz connected"),
    ("node", "node() tells its room and what runs on it", "usage stats metrics resources nodes"),
    ("get", "get(ref).events(follow=True), of one sandbox", "watch"),
    ("layers", "layers.import_(source, name) brings one in", "import_ import_layer build pull load push templates"),
    ("layers", "layers: list(), get(ref), import_(source, name)", "bases volumes volume snapshots registry"),
    ("capabilities", "capabilities() says what each backend can do here", "features supports backends"),
    ("job", "job(name): list() and stop()", "jobs group app project"),
    ("url", "url is where it connects to", "base_url host endpoint address api"),
    ("create", "files are a sandbox's: create(...).files", "files fs upload download read write"),
)
_SANDBOX: Final[tuple[Row, ...]] = (
    (
        "run",
        "run(...) waits for a program's end, spawn(...) does not",
        "exec exec_run execute commands run_command run_code call Popen code_run check_output exec_command "
        "shell_exec command system cmd execute_command check_call start_process",
    ),
    (
        "stop",
        "stop() ends it, as its `with` block does",
        "kill terminate close delete remove destroy shutdown rm cleanup stop_all disconnect detach aclose end exit",
    ),
    ("id", "Client().create(...) makes one", "create start restart launch new"),
    (
        "info",
        "info() tells its state",
        "status is_running reload attrs inspect labels poll get_info is_alive alive tags health ping running "
        "metadata get_state created_at refresh_data spec node",
    ),
    ("info", "info().end_reason says why it ended", "returncode exit_code end_reason"),
    (
        "usage",
        "usage() is what it has used, and uses now",
        "stats metrics get_metrics top resources memory cpu get_usage",
    ),
    ("events", "events(follow=True) ends when it has ended", "wait join wait_until_stopped wait_for_stop wait_for"),
    ("set_labels", "set_labels({...}) replaces all", "set_tags set_metadata update_labels add_labels tag"),
    (
        "extend",
        "extend(seconds) moves the end of its lifetime",
        "set_timeout keep_alive refresh set_ttl prolong refresh_activity set_auto_stop_interval set_autostop_interval",
    ),
    (
        "expose",
        "expose(port).url reaches what listens in it, exposed() is what can be reached",
        "get_host tunnels get_preview_link ports url forward get_url port_forward open_port publish preview tunnel",
    ),
    ("set_network", "set_network({...}), patch_network({...})", "network update_network networks"),
    (
        "files",
        "files.upload(local, path) and files.download(path, local) copy files and directories",
        "upload download put_archive get_archive copy_from copy_to cp put get copy upload_file download_file "
        "upload_dir",
    ),
    (
        "files",
        "files.read(path), files.write(path, data), files.list(path)",
        "filesystem fs read_file write_file open read write ls list_files listdir list_dir list file "
        "read_text write_text read_bytes exists mkdir",
    ),
    ("files", "files.watch(path)", "watch watch_dir"),
    (
        "session",
        "session() is a shell that lives on",
        "create_session get_or_create_session sessions start_session bash sh",
    ),
    ("spawn", "spawn(tty=True) gives a program a terminal", "pty terminal shell console create_pty interactive"),
    ("spawn", "output is its program's: run(...).stdout, process.output()", "output text logs stdout stderr get_logs"),
    (
        "spawn",
        "input is its program's: spawn(...).stdin.write(data)",
        "stdin send sendline send_stdin send_input stdin_write write_stdin input writelines type",
    ),
    ("process", "process(id) is the handle on a program, processes() what runs", "get_process connect attach pid ps"),
    ("processes", "processes() is what runs in it", "list_processes process_list children get_processes"),
    (
        "diff",
        "diff() is what has changed in it, files.download(path, local) takes it out",
        "snapshot commit export fork changes get_diff checkpoint clone",
    ),
    ("info", "it goes on while nobody asks: there is no pause", "pause unpause resume hibernate archive sleep suspend"),
)
_FILES: Final[tuple[Row, ...]] = (
    ("list", "list(path), of one directory", "ls glob listdir scandir walk list_dir list_files iterdir rglob readdir"),
    (
        "list",
        'list(path), of one directory; a program looks further: sbx.run(["find", path])',
        "find search tree find_files",
    ),
    ("list", 'a program looks in them: sbx.run(["grep", ...])', "grep search_files replace_in_files"),
    (
        "read",
        "read(path) is bytes, read_text(path) text; write(path, data) takes both",
        "open read_bytes write_bytes write_text readfile read_file write_file writefile get put load save "
        "set_contents cat edit readlines read_lines get_content",
    ),
    ("write", "write(path, data), of each", "write_files"),
    (
        "remove",
        "remove(path), of a directory with recursive=True",
        "delete rm rmtree unlink rmdir delete_file remove_file removedirs remove_dir delete_dir delete_folder del_file",
    ),
    (
        "mkdir",
        "mkdir(path, parents=True)",
        "make_dir makedirs create_folder create_dir mkdirs ensure_dir make_directory create_directory",
    ),
    (
        "stat",
        "stat(path).type, .size, .mode",
        "is_dir is_file info get_info isdir isfile get_file_info lstat getsize file_info is_symlink islink "
        "get_file_details size get_metadata readlink",
    ),
    ("exists", "exists(path)", "file_exists path_exists has is_there lexists"),
    ("move", "move(source, target, replace=...)", "rename replace mv move_file move_files rename_file"),
    ("chmod", "chmod(path, mode), as 0o755", "set_permissions set_file_permissions set_mode permissions"),
    ("chmod", "a program does that: sbx.run([...])", "copy cp chown symlink link touch truncate copyfile copytree ln"),
    (
        "upload",
        "upload(local, path) copies a file or a directory in",
        "upload_file upload_files upload_dir upload_folder put_archive copy_to add copy_in push copy_from_local",
    ),
    (
        "download",
        "download(path, local) copies a file or a directory out",
        "download_file download_files download_dir get_archive copy_from copy_out pull fetch download_folder",
    ),
    ("watch", "watch(path)", "watch_dir subscribe on_change inotify watch_directory"),
    ("watch", "sbx.diff(path)", "diff changes"),
)
_PROCESS: Final[tuple[Row, ...]] = (
    (
        "wait",
        "wait() gives its result, with exit_code, stdout and stderr; info().result is None until then",
        "poll result communicate returncode exit_code join wait_for_exit exitcode ok exitstatus signalstatus "
        "error wait_for_end done",
    ),
    (
        "info",
        "info() tells its state",
        "status is_running running state isalive is_alive alive inspect reload command args started_at tty name",
    ),
    (
        "kill",
        "signal(signal.SIGTERM) asks it to end, kill() ends all of it",
        "terminate close delete remove destroy stop send_signal shutdown cancel interrupt abort sendintr "
        "sendcontrol killpg end disconnect",
    ),
    (
        "stdin",
        "stdin.write(data)",
        "send sendline send_stdin send_input stdin_write write_stdin input write writelines type send_data",
    ),
    ("stdin", "stdin.close()", "close_stdin write_eof send_eof sendeof eof close_input"),
    (
        "lines",
        "lines() gives whole lines as they come, wait_for(text) one that has it",
        "read readline readlines getvalue iter_lines recv splitlines stream read_line recv_line iter_output recvline",
    ),
    (
        "output",
        "output() is what there is of stdout now, output(stream=2) of stderr",
        "logs get_logs text stdout_text tail get_output read_nonblocking before",
    ),
    (
        "wait_for",
        "wait_for(text, timeout_s=) waits for a line that has it",
        "expect expect_exact wait_until read_until readuntil wait_for_line wait_for_output wait_for_text after match",
    ),
    (
        "follow",
        "follow() is both streams as they come",
        "on_output on_stdout on_stderr events subscribe on_data on_exit",
    ),
    ("attach", "attach() is input and output over one connection", "interact connect websocket pty"),
    ("resize", "resize(rows, cols)", "setwinsize set_size resize_pty set_winsize winsize"),
    (
        "id",
        "id names it; the pid inside is in sbx.processes()",
        "pid process_id exec_id cmd_id sandbox_id sandbox container client",
    ),
    ("id", "the sandbox runs it: sbx.run(...), sbx.spawn(...)", "run exec spawn start restart"),
)
_SESSION: Final[tuple[Row, ...]] = (
    (
        "run",
        "run(text) gives the shell a command and waits for its end",
        "exec execute commands command run_command call exec_run run_code check_output do shell",
    ),
    (
        "run",
        "run(text, stdin=data): a command reads what it is given",
        "send sendline send_stdin send_input stdin_write write_stdin input write writelines type stdin "
        "close_stdin write_eof send_eof sendeof eof close_input",
    ),
    (
        "run",
        "run(text, timeout_s=) ends a command whose time is over",
        "interrupt cancel signal send_signal sendintr sendcontrol",
    ),
    (
        "run",
        "run(text).stdout, .stderr; on_output= gets it as it comes",
        "logs output stdout stderr read readline lines text get_logs get_output before after recv readlines",
    ),
    ("run", "run(text).exit_code", "returncode exit_code result poll"),
    (
        "run",
        "run(text) waits for its end; to wait for a line, sbx.spawn(...).wait_for(text)",
        "expect expect_exact wait_until read_until readuntil wait_for_line wait_for_output wait_for_text wait wait_for",
    ),
    ("run", 'run("cd DIR") lasts, as do `export NAME=value` and functions', "cd chdir cwd env setenv set_env export"),
    ("run", "run(text) waits; sbx.spawn(...) starts a program and does not", "spawn start Popen background"),
    (
        "info",
        "info() tells its state, and how many commands it was given",
        "running is_running state status alive is_alive busy commands_run isalive history",
    ),
    (
        "close",
        "close() ends it with all it has started, as its `with` block does",
        "stop kill terminate delete exit end shutdown remove destroy quit disconnect",
    ),
    (
        "id",
        "id names it; sbx.get_session(id) is the handle again",
        "session_id name key pid sandbox_id sandbox container client",
    ),
    ("run", "it has no terminal: sbx.spawn(tty=True)", "attach interact resize tty pty terminal"),
    ("run", "files are the sandbox's: sbx.files", "files fs upload download"),
)
_INPUT: Final[tuple[Row, ...]] = (
    ("write", "write(data)", "send sendline send_line print send_text send_data feed put writeline write_line"),
    ("write", "write(data) returns once all of it has arrived", "flush drain writelines"),
    (
        "close",
        "close() says that there is no more",
        "close_stdin write_eof send_eof sendeof eof close_input end send_signal shutdown",
    ),
    (
        "write",
        'write(b"\\x03") is ^C in a terminal; process.signal(signal.SIGINT) without one',
        "sendintr sendcontrol interrupt",
    ),
    ("offset", "offset is where the next byte goes, locate() asks for it", "tell seek position"),
    ("write", "it is no file: write(data), close()", "fileno closed writable buffer isatty encoding mode is_closing"),
    ("write", "the output is process.stdout, process.lines()", "read readline lines"),
)
_OUTPUT: Final[tuple[Row, ...]] = (
    (
        "located",
        "wait().stdout is all of it, iterating gives it as it comes, process.lines() by whole lines, "
        "process.output() what is there now",
        "read readline readlines getvalue lines splitlines text decode read1 readinto peek iter_lines "
        "readuntil buffer read_text read_bytes recv fileno readable at_eof read_nonblocking iter_content "
        "encoding isatty content data",
    ),
    (
        "follow",
        "process.wait_for(text, timeout_s=) waits for a line that has it",
        "expect expect_exact wait_until read_until wait_for_line wait_for_output wait_for_text wait_for",
    ),
    ("follow", "follow(offset) is a reader from there on, with close()", "close closed seek tell reader stream offset"),
    ("follow", "iterating it gives what comes", "next on_data subscribe"),
)
_READER: Final[tuple[Row, ...]] = (
    (
        "close",
        "iterating gives bytes as they come, process.output() what is there now",
        "read readline readlines get recv",
    ),
    ("close", "process.lines() gives whole lines", "lines text decode splitlines"),
    ("close", "close() lets go of it", "stop cancel shutdown terminate disconnect aclose unsubscribe end kill"),
    ("offset", "offset is the next byte", "tell seek position offsets"),
)
_FOLLOW: Final[tuple[Row, ...]] = (
    ("lines", "lines() gives whole lines", "readline readlines splitlines iter_lines text"),
    (
        "lines",
        "iterating gives (stream, data) as it comes",
        "read recv get next stdout stderr output poll receive messages",
    ),
    (
        "lines",
        "process.wait_for(text, timeout_s=) waits for a line that has it",
        "expect expect_exact wait_until read_until readuntil wait_for_line wait_for_output wait_for_text wait_for",
    ),
    ("result", "result is how the program ended, once the iteration is over", "returncode exit_code wait join"),
    (
        "close",
        "close() lets go of it, the program goes on",
        "stop cancel shutdown terminate disconnect aclose unsubscribe end kill detach",
    ),
    ("offsets", "offsets are the next bytes of the streams", "offset tell seek position"),
)
_ATTACHMENT: Final[tuple[Row, ...]] = (
    (
        "write",
        "write(data)",
        "send sendline stdin send_input send_stdin input send_line sendall feed writelines send_text",
    ),
    ("write", "write(data) returns once it is on its way", "flush drain"),
    ("close_input", "close_input() is the end of the input", "close_stdin write_eof send_eof sendeof eof shutdown"),
    (
        "signal",
        "signal(signal.SIGTERM); process.kill() ends all of it",
        "kill send_signal terminate interrupt sendintr stop",
    ),
    ("resize", "resize(rows, cols)", "setwinsize set_size resize_pty"),
)
_LINES: Final[tuple[Row, ...]] = (
    ("next", "next(timeout_s=) waits for one line", "get readline read recv wait poll get_nowait pop take fetch"),
    ("next", "list(lines) are all, to the end", "readlines read_all all collect"),
    (
        "next",
        "process.wait_for(text, timeout_s=) waits for a line that has it",
        "expect expect_exact wait_until read_until readuntil wait_for_line wait_for_output wait_for_text wait_for",
    ),
    (
        "close",
        "close() lets go of it, the program goes on",
        "stop cancel shutdown terminate disconnect aclose unsubscribe end kill",
    ),
    ("offsets", "offsets is where the next line of each stream begins", "offset tell seek position"),
    ("result", "result is how the program ended, once the iteration is over", "returncode exit_code"),
    ("next", "each line has .stream, 1 or 2", "stdout stderr stream text"),
)
_LINE: Final[tuple[Row, ...]] = (
    ("data", "it is a str itself; data are its exact bytes", "text content line message value string output bytes raw"),
    ("stream", "stream is 1 for stdout, 2 for stderr", "fd source channel name stream_name stdout stderr"),
    ("offset", "offset is where it begins in its stream", "number lineno line_number start position"),
    ("ending", "ending: newline, end, cut or gap", "newline complete truncated"),
    ("data", "re.search(pattern, line) finds a part of it", "group groups match search span"),
)
_WATCH: Final[tuple[Row, ...]] = (
    (
        "next",
        "next(timeout_s=) waits for one change, iterating gives each",
        "get poll wait read get_new_events recv get_nowait changes events take on_change subscribe fetch",
    ),
    (
        "close",
        "close() ends it, as its `with` block does",
        "stop cancel shutdown terminate disconnect aclose unsubscribe end kill unwatch remove join",
    ),
    ("next", "entering it begins: `with sbx.files.watch(path) as changes:`", "start open begin run watch"),
)
_EVENTS: Final[tuple[Row, ...]] = (
    ("close", "iterate over it; sbx.events(follow=True) waits for more", "next get poll read wait list all recv fetch"),
    ("close", "close() lets go of it", "stop cancel shutdown terminate disconnect aclose unsubscribe end kill"),
)
_DIFF: Final[tuple[Row, ...]] = (
    (
        "report",
        "iterate over it; then report says how much there was",
        "changes list all paths files next get read summary",
    ),
    ("report", "iterate over it; each change has kind, path, type, what", "added changed deleted modified removed"),
)
_BATCH: Final[tuple[Row, ...]] = (
    (
        "__iter__",
        "iterating gives each sandbox as it gets ready, inside its `with` block",
        "sandboxes results get list all wait join ready next gather created",
    ),
    ("__iter__", "its `with` block stops them all at the end", "stop kill close delete terminate stop_all"),
    ("__iter__", "its items run programs: `for sbx in batch: sbx.run(...)`", "run exec map spawn commands"),
    ("__iter__", "iterating gives CreateFailed for one that could not be made", "errors failed failures"),
)
_JOB: Final[tuple[Row, ...]] = (
    ("stop", "stop() ends them all", "kill terminate close delete remove destroy cancel stop_all"),
    ("list", "list() gives its sandboxes", "sandboxes all get find containers status info"),
    ("name", "name is what sandboxes have as job=", "id job_id"),
    ("list", "Client().create(job=name) makes one of it", "create run start submit create_many"),
)
_LAYERS: Final[tuple[Row, ...]] = (
    (
        "import_",
        "import_(source, name)",
        "create add build pull import_layer load push upload from_dockerfile from_image",
    ),
    ("get", "get(ref)", "find inspect info stat"),
    ("remove", "remove(ref)", "delete rm prune unload"),
    ("list", "list() gives all", "ls all"),
)
_RUNRESULT: Final[tuple[Row, ...]] = (
    (
        "exit_code",
        "exit_code is 0 and ok true for success; cause and limits_hit say why not",
        "returncode success error timed_out failed status check_returncode code rc exit_status return_code "
        "exitcode succeeded oom killed raise_for_status",
    ),
    (
        "stdout",
        "stdout and stderr are text, stdout_bytes and stderr_bytes exact",
        "output text logs result lines read combined stdout_text results content out_text decode splitlines strip",
    ),
    ("duration_s", "duration_s is how long it ran", "duration elapsed time runtime execution_time"),
    ("process_id", "process_id names it", "pid id"),
    ("truncated", "truncated says so, dropped_bytes how much", "is_truncated"),
)
# By the names of classes, without `Async`.
NAMES: Final[dict[str, tuple[Row, ...]]] = {
    "Client": _CLIENT,
    "Sandbox": _SANDBOX,
    "Files": _FILES,
    "Process": _PROCESS,
    "Session": _SESSION,
    "Input": _INPUT,
    "Output": _OUTPUT,
    "Reader": _READER,
    "Follow": _FOLLOW,
    "Attachment": _ATTACHMENT,
    "Lines": _LINES,
    "Line": _LINE,
    "Watch": _WATCH,
    "Events": _EVENTS,
    "Diff": _DIFF,
    "Batch": _BATCH,
    "Job": _JOB,
    "Layers": _LAYERS,
    "RunResult": _RUNRESULT,
}
# Methods that others have as an object with methods: what is said of an attribute of ours.
OBJECTS: Final[dict[str, tuple[Row, ...]]] = {
    "Sandbox.process": (
        (
            "run",
            "sbx.run(...) waits for a program's end, sbx.spawn(...) does not",
            "exec code_run start run execute spawn",
        ),
        ("session", "sbx.session() is a shell that lives on", "create_session execute_session_command get_session"),
        ("processes", "sbx.processes() is what runs in it", "list list_sessions kill"),
    ),
}
# Names of the package: others' classes and errors, and ours.
PACKAGE: Final[dict[str, str]] = {
    "DeadlineExceeded": "TimeoutError Timeout TimeoutException TimeoutExpired SandboxTimeoutError DeadlineError",
    "DsecError": "Error APIError SandboxError SandboxException DockerException DaytonaError Exception DSecError",
    "NotFound": "NotFoundError SandboxNotFound NotFoundException SandboxNotFoundError SandboxNotFoundException",
    "CommandFailed": "CalledProcessError CommandExitException CommandError ContainerError ProcessError ExecError",
    "FileNotFound": "FileNotFoundError",
    "FileExists": "FileExistsError",
    "PermissionDenied": "PermissionError",
    "IsADirectory": "IsADirectoryError",
    "InvalidSpec": "ValidationError InvalidArgument InvalidArgumentException ValueError BadRequest InvalidError",
    "InputClosed": "BrokenPipeError BrokenPipe",
    "NodeUnreachable": "ConnectionError ConnectError Disconnected Unreachable ServerError",
    "Unauthenticated": "AuthenticationError AuthError AuthenticationException Unauthorized",
    "Client": "Dsec DSec DsecClient DSecClient DockerClient from_env Daytona App connect client init",
    "AsyncClient": "AsyncDsec AsyncDaytona async_client",
    "Sandbox": "Container Box VM Environment",
    "Process": "Popen PIPE CommandHandle ContainerProcess Command",
    "Session": "Shell Pty Bash",
    "RunResult": "ExecResult CommandResult CompletedProcess Result ExecutionResult Execution",
    "Spec": "Config SandboxSpec SandboxConfig CreateSandboxParams Resources Template",
    "Entry": "EntryInfo FileInfo",
    "FileEvent": "FilesystemEvent FileChangeEvent",
}
