"""Launcher of one program in a folder, or in Linux namespaces of its own.

    python isolate.py SETTINGS WORD...

`sandbox.py` starts it as a script, so it needs only the standard library. SETTINGS is JSON:

    {"kind": "processes", "cwd": DIR, "file_bytes": N}
    {"kind": "namespaces", "cwd": DIR, "file_bytes": N, "root": DIR, "writable": {PATH: DIR},
     "readable": {PATH: DIR}, "visible": [PATH], "hidden": [PATH], "max_processes": N,
     "memory_bytes": N}

With namespaces, the program sees the file system read-only, except the directories in `writable`,
which appear at their paths. /tmp, /home, /root and /run are empty but for those, and for `visible`
paths. It sees no other processes, and those that it leaves behind end with it. It has no
capabilities. It shares the kernel and the network with this machine.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, 1, 2  # Linux 5.12
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
LEAST_PID_MAX = 301  # what Linux allows
POLL_S = 0.1  # between two measurements of shared memory
NUM_CAPABILITIES = 64  # more than there are
# Directories of the new root that hold nothing of this machine.
REPLACED = {"tmp", "home", "root", "run", "proc", "sys", "dev", "mnt", "media"}
EMPTIED = ("/tmp/", "/home/", "/root/", "/run/", "/mnt/", "/media/", "/var/tmp/")
# With tty, a program opens the terminal of its own session: one of the sandbox's, or none.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SMALL = "size=16m,nr_inodes=4k,mode=1777"
TERMINALS = "newinstance,ptmxmode=0666,max=64"
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def main(settings: "dict", words: "list[str]") -> None:
    """Become the program, or its first ancestor in new namespaces."""
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
    if settings["kind"] == "processes":
        os.chdir(settings["cwd"])
        os.execvp(words[0], words)
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    end_as(wait_for(fork(lambda: first_process(settings, words))) or 0)


def first_process(settings: "dict", words: "list[str]") -> int:
    """Build the file system, start the program and wait for it. Return its wait status."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    build_root(settings)
    os.chroot(settings["root"])
    os.chdir(settings["cwd"])
    for number in range(NUM_CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    set_limit(resource.RLIMIT_NPROC, settings["max_processes"])  # of this namespace; root has none
    no_capabilities()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # so that `wait_for` gets it
    program = fork(lambda: become(words))
    while (status := wait_for(program, POLL_S)) is None:
        if segments() > settings["memory_bytes"]:
            os.write(2, b"shared memory is above memory_mib\n")
            return signal.SIGKILL  # all others end with this process
    return status


def become(words: "list[str]") -> None:
    """Replace this process by the program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.execvp(words[0], words)


def build_root(settings: "dict") -> None:
    """Mount what the program may see under `root`."""
    root = settings["root"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    replaced = {f"/{name}" for name in REPLACED} | {*settings["writable"], *settings["readable"]}
    for name in os.listdir("/"):
        if f"/{name}" not in replaced:
            show_directory(f"/{name}", f"{root}/{name}")
    for path in ("/home", "/run", "/var/tmp"):
        cover(root + path)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    with contextlib.suppress(OSError), open(f"{root}/proc/sys/kernel/pid_max", "w") as file:
        file.write(str(LEAST_PID_MAX + settings["max_processes"]))  # Linux 6.14: of this namespace
    read_only(f"{root}/proc")  # for root, it has settings of the whole machine
    make_devices(f"{root}/dev")
    for path, source in settings["writable"].items():
        bind(source, root + path)
    for path, source in settings["readable"].items():
        bind(source, root + path)
        read_only(root + path)
    for path in settings["visible"]:
        if os.path.exists(path) and path.startswith(EMPTIED):
            bind(path, root + path)
            read_only(root + path)
    for path in settings["hidden"]:
        if os.path.isdir(root + path):
            cover(root + path)
    read_only(root, 0)  # itself, not what is mounted below


def show_directory(path: str, target: str) -> None:
    """Show a directory of this machine, or a link to one, read-only."""
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.mkdir(target)
        mount(path, target, None, MS_BIND | MS_REC)
        read_only(target)


def make_devices(folder: str) -> None:
    """Make the devices that every program expects, and none with data of this machine."""
    os.mkdir(folder)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID, "size=16m,nr_inodes=4k,mode=755")
    for name in filter(lambda name: os.path.exists(f"/dev/{name}"), DEVICES):
        with open(f"{folder}/{name}", "w"):
            pass
        mount(f"/dev/{name}", f"{folder}/{name}", None, MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{folder}/{name}")
    os.mkdir(f"{folder}/shm")
    os.chmod(f"{folder}/shm", 0o1777)
    os.mkdir(f"{folder}/pts")
    with contextlib.suppress(OSError):  # some systems mount none; a program then has no terminal
        mount("devpts", f"{folder}/pts", "devpts", MS_NOSUID | MS_NOEXEC, TERMINALS)
        os.symlink("pts/ptmx", f"{folder}/ptmx")


def cover(path: str) -> None:
    """Mount an empty, small file system over a directory."""
    os.makedirs(path, exist_ok=True)
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, SMALL)


def bind(source: str, target: str) -> None:
    """Show `source`, a file or a directory, at `target`."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    mount(source, target, None, MS_BIND | MS_REC)


def mount(
    source: "str | None", target: str, kind: "str | None", flags: int, data: "str | None" = None
) -> None:
    """Call Linux's mount. Raises OSError."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(LIBC.mount(*encoded[:3], flags, encoded[3]), target)


def read_only(path: str, flags: int = AT_RECURSIVE) -> None:
    """Make a mount, and by default those below it, read-only. Raises OSError."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    check(
        LIBC.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size
        ),
        path,
    )


def no_capabilities() -> None:
    """Give up all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    check(LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))


def fork(work: "object") -> int:
    """Run a function in a child, which ends as the wait status that it returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        end_as(work())  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - this child must not go on as its parent
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(126)


def wait_for(pid: int, timeout_s: float = math.inf) -> "int | None":
    """Wait for a child, and reap any other. Return its wait status, or None after the time-out."""
    give_up = time.monotonic() + timeout_s
    while True:
        child, status = os.waitpid(-1, 0 if timeout_s == math.inf else os.WNOHANG)
        if child == pid:
            return status
        if not child:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left_s) is None:
                return None


def segments() -> int:
    """Return the bytes of System V shared memory, which no process has to map."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sysvipc/shm") as file:
        column = file.readline().split().index("rss")
        return sum(int(line.split()[column]) for line in file)
    return 0


def end_as(status: int) -> None:
    """End this process as one with this wait status."""
    if os.WIFSIGNALED(status) and os.getpid() != 1:  # signals do not end the first process
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def set_limit(name: int, value: int) -> None:
    """Set both limits of a resource, or leave them if that is not possible."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(name, (value, value))


def check(result: int, path: str = "") -> None:
    """Raise OSError if a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or "namespaces")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]), sys.argv[2:])
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
