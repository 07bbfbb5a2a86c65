"""Reasons for which rollouts fail: who is to blame, what happened and what to do."""

from typing import NamedTuple


class Reason(NamedTuple):
    """Meaning of a failure reason."""

    who: str  # agent, infrastructure, or nobody for a stopped rollout
    text: str
    fix: str


REASONS = {
    "no_reward": Reason(
        "agent",
        "the agent returned None or a text, and posted no reward",
        "return a number, or a dict with `reward`",
    ),
    "bad_reward": Reason(
        "agent",
        "the reward is no finite number, or above `rollout.max_abs_reward`",
        "check the division or the parsing that made it",
    ),
    "bad_component": Reason(
        "agent",
        "a function of `rewards` raised, or returned no finite number; a lost connection in it "
        "counts as infrastructure",
        "fix the function for this rollout's transcript",
    ),
    "judge_failed": Reason(
        "infrastructure",
        "a judge of `rewards` gave no usable answer in `rollout.max_attempts` calls",
        "check its server and model; a small one may need `reasons: false`",
    ),
    "deadline": Reason(
        "agent",
        "the agent ran longer than `rollout.timeout_s`, without the waits of its calls; a call "
        "that decoded then is recorded with its tokens so far",
        "raise it, ask for fewer tokens, or lower `rollout.concurrency` on a busy machine",
    ),
    "deadline_in_queue": Reason(
        "infrastructure",
        "its calls waited for longer than `rollout.timeout_s` and none got a token, or for ten "
        "times as long in all",
        "lower `rollout.concurrency`, or raise `rollout.timeout_s`",
    ),
    "CancelledError": Reason(
        "agent", "the agent cancelled its own task", "catch the cancellation in the agent"
    ),
    "unreadable_error": Reason(
        "agent", "the agent raised an error that cannot be printed", "fix the error's class"
    ),
    "unnamed_error": Reason(
        "agent", "the agent raised an error whose class has no name", "name the class"
    ),
    "ExitStatus": Reason(
        "agent",
        "a program ended with another exit status than 0",
        "read the last line of its standard error, which is the detail",
    ),
    "KilledBySignal": Reason(
        "agent", "a signal ended a program", "look for a crash or the kernel's memory killer"
    ),
    "OverLimit": Reason(
        "agent",
        "a program used more than `agent.max_processes` or `agent.memory_mib`",
        "raise the limit that the detail names",
    ),
    "MemoryError": Reason(
        "infrastructure",
        "memory ran out in a process without `agent.memory_mib`; so does RuntimeError if no thread "
        "is left, and OSError if no file descriptor is",
        "lower `rollout.concurrency`, or free memory",
    ),
    "TemporaryFailure": Reason(
        "infrastructure",
        "a program ended with exit status 75: something that it needs is down",
        "start that service; the rollout is tried again",
    ),
    "NotStarted": Reason(
        "infrastructure", "a program cannot be started any more", "check memory and open files"
    ),
    "worker_lost": Reason(
        "infrastructure",
        "a worker died, or one on another machine sent no heartbeat for `agent.lease_s`",
        "the rollout is tried on another worker; look at what the worker printed",
    ),
    "worker_silent": Reason(
        "infrastructure",
        "a worker sent no heartbeat for `agent.lease_s`, was ended and replaced",
        "the rollout is tried again where nothing else runs; look for `silences_workers`",
    ),
    "silences_workers": Reason(
        "agent",
        "the agent silenced a second worker, in which nothing else ran",
        "look for code that holds the interpreter, such as a slow regular expression",
    ),
    "worker_stopped": Reason(
        "infrastructure",
        "a worker was stopped and gave the rollout back",
        "nothing: the rollout is tried on another worker",
    ),
    "path_not_found": Reason(
        "infrastructure",
        "a worker does not see a path in the task",
        "mount or copy it to the worker's machine at the same path",
    ),
    "reported_error": Reason(
        "agent",
        "a program outside ended its rollout with an error",
        "read the detail, which it sent",
    ),
    "expired": Reason(
        "infrastructure",
        "a rollout from outside had no request for `agent.idle_s`, and no reward; or none in 30 s "
        "since it was opened, and another took its place",
        "end each rollout; raise `agent.idle_s` if its users think for longer",
    ),
    "discarded": Reason(
        "infrastructure",
        "a program outside ended its rollout with `discard`, or hung up before it was open",
        "nothing: that was its choice",
    ),
    "stop": Reason(
        "nobody",
        "the run was stopped (Ctrl-C, SIGTERM) while the rollout ran",
        "run the same command: the rollout is repeated with the same seed",
    ),
    "crash": Reason(
        "nobody",
        "the trainer was killed while the rollout ran",
        "run the same command: the rollout is repeated with the same seed",
    ),
    "call_timeout": Reason(
        "infrastructure",
        "a call waited for its first token for longer than `rollout.call_timeout_s`, and no retry "
        "was answered",
        "lower `rollout.concurrency`, or raise the limit",
    ),
    "draining": Reason("infrastructure", "the server was shutting down", "run the command again"),
    "engine_error": Reason(
        "infrastructure", "the engine failed", "read the error in the log and report it"
    ),
    "internal_error": Reason(
        "infrastructure", "the gateway failed", "read the error in the log and report it"
    ),
    "store_error": Reason(
        "infrastructure", "the record of a call cannot be written", "free disk space"
    ),
    "server_lost": Reason(
        "infrastructure",
        "the sampler of the rollout died or stopped answering",
        "nothing: the rollout is tried again on another sampler, and a new one is started",
    ),
    "upstream_error": Reason(
        "infrastructure", "the server of a role with a URL failed", "check that server"
    ),
}
