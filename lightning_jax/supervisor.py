"""A process between the trainer and one program, which ends all that the program started.

    python supervisor.py FD MAX_PROCESSES MEMORY_BYTES NUM_FILES WORD...

`process_group.py` starts it as a script. It needs nothing but the standard library. On Linux it is
the subreaper of the program: whatever a descendant does, leave its session or clear its environment
included, its next living ancestor is this process or a process below. So the tree is found from
here, and is empty once this process has no child. Elsewhere the program's process group is ended.

FD is a socket to the trainer. The trainer closes it to have the program ended. Its closing by the
system tells of a trainer that was killed. Lines go back, the second when all has ended:

    started PID
    exit STATUS         the program's, minus the signal's number where a signal ended it
    errno NUMBER        the program could not be started
    over SETTING        it was ended because it was over this limit

A limit of 0 is none. MEMORY_BYTES limits the data of each process, and the anonymous memory of all
together. Every process of the program is the first that the kernel ends when memory runs out.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from types import FrameType

GRACE_S = 2.0  # from SIGTERM to SIGKILL
KILL_S = 5.0  # for killed processes to be gone; one in the kernel's hands may stay
POLL_S = 0.1  # between two looks at what the program uses
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """One program and its descendants."""

    def __init__(self, socket: int, max_processes: int, memory: int, num_files: int) -> None:
        self.socket, self.trainer = socket, os.getppid()
        self.max_processes, self.memory, self.num_files = max_processes, memory, num_files
        os.set_inheritable(socket, False)
        self.is_subreaper = (
            sys.platform == "linux"
            and os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
            and prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
        )
        self.program, self.status = 0, None
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Handlers, unlike SIG_IGN, are not inherited. A program's signals do not end this process.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _wake_up)

    def run(self, words: list[str]) -> str:
        """Run the program until it ends or must end; return the line for the trainer."""
        if error := self.start(words):
            return f"errno {error}"
        setting = ""
        while self.status is None and not setting and not self.is_told_to_end():
            self.reap()
            setting = self.setting_exceeded()
        self.end_all(at_once=bool(setting))
        return f"over {setting}" if setting else f"exit {self.status or 0}"

    def start(self, words: list[str]) -> int:
        """Start the program; return 0, or the error's number."""
        failed, failing = os.pipe()
        self.program = os.fork()
        if not self.program:
            self.become(words, failing)
        os.close(failing)
        said = os.read(failed, 16)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # which the program alone holds open from now on
            os.dup2(null, standard)
        return int(said or 0)

    def become(self, words: list[str], failing: int) -> None:
        """Turn this process, which was just forked, into the program."""
        try:
            os.setsid()
            self.tell(f"started {os.getpid()}")  # here, as the program may kill its supervisor
            if self.is_subreaper:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            limit(resource.RLIMIT_NOFILE, self.num_files)
            if self.memory:
                limit(resource.RLIMIT_DATA, self.memory)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(failing, str(error.errno or 1).encode())
        finally:
            os._exit(127)

    def tell(self, line: str) -> None:
        """Send the trainer a line, unless it is gone."""
        with contextlib.suppress(OSError):
            os.write(self.socket, f"{line}\n".encode())

    def is_told_to_end(self) -> bool:
        """Wait for a signal, the trainer or a moment; return whether the program must end."""
        ready, _, _ = select.select([self.socket, self.woken], [], [], POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        return self.socket in ready or os.getppid() != self.trainer

    def reap(self) -> bool:
        """Take note of children that ended; return whether none is left."""
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
        """Return the name of a limit that the program is over, or an empty text."""
        if not self.is_subreaper:
            return ""
        pids = descendants()
        if self.max_processes and len(pids) > self.max_processes:
            return "max_processes"
        if self.memory and sum(map(anonymous_memory, pids)) > self.memory:
            return "memory_mib"
        return ""

    def end_all(self, at_once: bool) -> None:
        """End the program and its descendants: politely, unless `at_once`, then for sure."""
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
        """Wait until a child ends, for a moment at most."""
        select.select([self.woken], [], [], 0.02)
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)

    def stop_all(self) -> None:
        """Stop all processes, so that none starts another while the others are killed."""
        stopped = set()
        for _ in range(50):
            found = set(descendants()) - stopped if self.is_subreaper else set()
            if not found:
                return
            stopped |= found
            send_each(found, signal.SIGSTOP)

    def send(self, number: int) -> bool:
        """Send all of them a signal; return whether there was one."""
        if self.is_subreaper:
            return send_each(descendants(), number)
        try:
            os.killpg(self.program, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _wake_up(number: int, frame: "FrameType | None") -> None:
    """Do nothing: the number is written to the pipe that `wait` reads."""


def prctl(option: int, argument: int) -> int:
    """Call Linux's prctl; return 0 if it did what was asked."""
    return ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def limit(name: int, value: int) -> None:
    """Lower a soft limit to the value; what cannot be had stays as it is."""
    hard = resource.getrlimit(name)[1]
    with contextlib.suppress(OSError, ValueError):
        if value and (hard == resource.RLIM_INFINITY or value <= hard):
            resource.setrlimit(name, (value, hard))


def send_each(pids: "set[int] | list[int]", number: int) -> bool:
    """Send each process a signal; return whether there was one."""
    sent = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            sent = True
    return sent


def descendants() -> "list[int]":
    """Return the processes below this one; those that end or start meanwhile may be missing."""
    found, unseen = [], [os.getpid()]
    while unseen:
        pid = unseen.pop()
        children = children_of(pid)
        found += children
        unseen += children
    return found


def children_of(pid: int) -> "list[int]":
    """Return the children of all threads of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def anonymous_memory(pid: int) -> int:
    """Return the bytes of memory that a process alone holds, files that it maps left out."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


if __name__ == "__main__":
    FD, *LIMITS = map(int, sys.argv[1:5])
    SUPERVISOR = Supervisor(FD, *LIMITS)
    SUPERVISOR.tell(SUPERVISOR.run(sys.argv[5:]))
    os._exit(0)  # nothing is left to put in order
