"""Supervisor of one program, which kills all processes that the program started.

    python supervisor.py TASK MAX_PROCESSES MEMORY_BYTES NUM_FILES WORD...

`process.py` starts it as a script. It needs only the standard library. psutil would double the time
to start, and read every process of the machine whenever the limits are checked.

On Linux it is the subreaper of the program. Even if a descendant leaves its session or clears its
environment, its next living ancestor is this process or a descendant of it. The tree is therefore
found from here, and it is empty once this process has no child. A guard, which is this process's
parent, is a subreaper too: if the program kills this process, the guard kills what is left. On
other systems the program's process group is killed.

Standard input is a socket to the trainer. The trainer closes it to end the program. If the trainer
is killed, the system closes it. TASK is the descriptor of the program's standard input. These lines
go back, the second one after all processes have ended:

    started PID
    exit STATUS         status of the program, or minus the number of the signal that killed it
    errno NUMBER        the program could not be started
    over SETTING        the program was killed because it exceeded this limit

A limit of 0 means no limit. MEMORY_BYTES limits the data of each process, and the memory of all of
them together: what is their own, and files in memory that they share or hold open. When memory runs
out, the kernel kills the program's processes first.
"""

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import sys
import time
from types import FrameType

GRACE_S = 2.0  # from SIGTERM to SIGKILL
KILL_S = 5.0  # for killed processes to be gone; one blocked in the kernel may stay
POLL_S = 0.1  # between two checks of the limits
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
IN_MEMORY = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero ")  # how paths of such files begin


class Supervisor:
    """One program and its descendants."""

    def __init__(self, task: int, max_processes: int, memory: int, num_files: int) -> None:
        self.socket, self.trainer = os.dup(0), os.getppid()  # the copy is not inherited
        os.dup2(task, 0)
        os.close(task)
        self.max_processes, self.memory, self.num_files = max_processes, memory, num_files
        self.is_subreaper = (
            sys.platform == "linux"
            and os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
            and prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
        )
        if self.is_subreaper:
            guard_child()
            self.trainer = os.getppid()  # the guard, which ends if it is killed or the trainer is
        self.program, self.status = 0, None
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Handlers keep the program's signals from ending this process. They are not inherited,
        # unlike SIG_IGN.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _wake_up)

    def run(self, words: list[str]) -> str:
        """Run the program until it exits or must end, and return the last line for the trainer."""
        if error := self.start(words):
            return f"errno {error}"
        setting = ""
        while self.status is None and not setting and not self.should_end():
            self.reap()
            setting = self.setting_exceeded()
        self.end_all(at_once=bool(setting))
        return f"over {setting}" if setting else f"exit {self.status or 0}"

    def start(self, words: list[str]) -> int:
        """Start the program. Return 0, or the error number."""
        failed, failing = os.pipe()
        self.program = os.fork()
        if not self.program:
            self.become(words, failing)
        os.close(failing)
        error_number = os.read(failed, 16)
        close_standard()
        return int(error_number or 0)

    def become(self, words: list[str], failing: int) -> None:
        """Replace this process, just forked, by the program."""
        try:
            os.setsid()
            self.tell(f"started {os.getpid()}")  # here, because the program may kill its supervisor
            if self.is_subreaper:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            set_limit(resource.RLIMIT_NOFILE, self.num_files)
            if self.memory:
                set_limit(resource.RLIMIT_DATA, self.memory)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(failing, str(error.errno or 1).encode())
        finally:
            os._exit(127)

    def tell(self, line: str) -> None:
        """Send the trainer a line, unless it is gone."""
        with contextlib.suppress(OSError):
            os.write(self.socket, f"{line}\n".encode())

    def should_end(self) -> bool:
        """Wait for a signal, the trainer or POLL_S. Return True if the program must end."""
        ready, _, _ = select.select([self.socket, self.woken], [], [], POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        return self.socket in ready or os.getppid() != self.trainer

    def reap(self) -> bool:
        """Record children that ended. Return True if none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.is_subreaper or not self.send(0)
            if not pid:
                return False
            if pid == self.program:
                self.status = os.waitstatus_to_exitcode(status)

    def setting_exceeded(self) -> str:
        """Return the name of a limit that the program exceeds, or ""."""
        if not self.is_subreaper:
            return ""
        pids = descendants()
        if self.max_processes and len(pids) > self.max_processes:
            return "max_processes"
        if self.memory and self.exceeds_memory(pids):
            return "memory_mib"
        return ""

    def exceeds_memory(self, pids: "list[int]") -> bool:
        """Return True if all processes together use more memory than their limit."""
        files = open_in_memory(pids)
        room = self.memory - sum(map(anonymous_memory, pids)) - sum(files.values())
        # Pages that processes share count once, which takes long to find out. Few have so many.
        return room < 0 or (
            sum(map(shared_memory, pids)) > room
            and sum(mapped_in_memory(pid, files) for pid in pids) > room
        )

    def end_all(self, at_once: bool) -> None:
        """End the program and its descendants: SIGTERM, a grace unless `at_once`, then SIGKILL."""
        self.send(signal.SIGTERM)
        give_up = time.monotonic() + (0 if at_once else GRACE_S)
        while not self.reap() and time.monotonic() < give_up:
            self.wait()
        give_up = time.monotonic() + KILL_S
        while not self.reap() and time.monotonic() < give_up:
            self.stop_all()
            self.send(signal.SIGKILL)
            self.wait()

    def wait(self) -> None:
        """Wait briefly for a child to end."""
        select.select([self.woken], [], [], 0.02)
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)

    def stop_all(self) -> None:
        """Stop all processes, so that none starts another while they are killed."""
        stopped = set()
        for _ in range(50):
            running = set(descendants()) - stopped if self.is_subreaper else set()
            if not running:
                return
            stopped |= running
            send_signal(running, signal.SIGSTOP)

    def send(self, number: int) -> bool:
        """Send a signal to all processes. Return True if there was one."""
        if self.is_subreaper:
            return send_signal(descendants(), number)
        try:
            os.killpg(self.program, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def guard_child() -> None:
    """Fork, and return in the child. This process waits for it, then kills all that is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _wake_up)  # as in the child
    child = os.fork()
    if not child:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # is not inherited
        return
    close_standard()
    status, give_up = None, math.inf
    while time.monotonic() < give_up:
        try:
            pid, end = os.waitpid(-1, os.WUNTRACED if status is None else os.WNOHANG)
        except ChildProcessError:
            break  # nothing is left
        if pid == child and os.WIFSTOPPED(end):
            os.kill(child, signal.SIGCONT)
        elif pid == child:
            status, give_up = end, time.monotonic() + KILL_S
        if status is not None and (pids := descendants()):
            send_signal(pids, signal.SIGSTOP)  # so that none starts another
            send_signal(pids, signal.SIGKILL)
            time.sleep(0.002)
    os._exit(int(bool(status)))


def close_standard() -> None:
    """Close the standard descriptors, so that only the program has its input and outputs."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.close(null)


def _wake_up(number: int, frame: "FrameType | None") -> None:
    """Do nothing. The signal number is written to the pipe that `wait` reads."""


def prctl(option: int, argument: int) -> int:
    """Call Linux's prctl. Return 0 if it succeeded."""
    return ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def set_limit(name: int, value: int) -> None:
    """Set a soft limit, or leave it as it is if that is not possible."""
    hard = resource.getrlimit(name)[1]
    with contextlib.suppress(OSError, ValueError):
        if value and (hard == resource.RLIM_INFINITY or value <= hard):
            resource.setrlimit(name, (value, hard))


def send_signal(pids: "set[int] | list[int]", number: int) -> bool:
    """Send each process a signal. Return True if there was one."""
    sent = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            sent = True
    return sent


def descendants() -> "list[int]":
    """Return the descendants of this process. Those that start or end meanwhile may be missing."""
    pids, unseen = [], [os.getpid()]
    while unseen:
        pid = unseen.pop()
        children = children_of(pid)
        pids += children
        unseen += children
    return pids


def children_of(pid: int) -> "list[int]":
    """Return the children of all threads of a process."""
    pids = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += [int(word) for word in file.read().split()]
    return pids


def anonymous_memory(pid: int) -> int:
    """Return the bytes of memory that only this process uses, without mapped files."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


def shared_memory(pid: int) -> int:
    """Return the bytes of files in memory that a process maps, with pages that others share."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))
    return 0


def open_in_memory(pids: "list[int]") -> "dict[tuple[int, int], int]":
    """Return the bytes of each file in memory that processes hold open, by device and inode."""
    sizes = {}
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith(IN_MEMORY):
                        status = os.stat(entry.path)
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes


def mapped_in_memory(pid: int, counted: "dict[tuple[int, int], int]") -> int:
    """Return a process's share of the files in memory that it maps and that are not `counted`."""
    total, is_counted = 0, False
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps") as file:
        for line in file:
            words = line.split(None, 5)
            if "-" in words[0]:  # the range of a mapping
                major, minor = (int(part, 16) for part in words[3].split(":"))
                file_id = os.makedev(major, minor), int(words[4])
                path = words[5] if len(words) > 5 else ""
                is_counted = path.startswith(IN_MEMORY) and file_id not in counted
            elif is_counted and words[0] == "Pss:":
                total += int(words[1]) * 1024
    return total


if __name__ == "__main__":
    SUPERVISOR = Supervisor(*map(int, sys.argv[1:5]))
    SUPERVISOR.tell(SUPERVISOR.run(sys.argv[5:]))
    os._exit(0)  # nothing is left to clean up
