"""Runner inside the sandbox: runs the tests in one process and the tested program in another, or calls a function that generates rows or
rewards answers, or an environment. Imports nothing from the project.

The first process confines itself and, for tests, forks the program's process, which knows nothing of what follows. Then it reads a JSON
object from its standard input, writes `started`, runs the tests and writes its verdict, each line prefixed with the object's secret word;
or it calls the function that generates rows, and writes a line per row and a final one; or it reads further lines with answers, and writes
a line with the rewards of each batch, or with the environment's reaction. The tests call the program's function through a pipe and get
values back, never objects, so nothing that a program does to its interpreter (exits, patched builtins, objects that equal everything) can
make a test pass. No process can inspect the first one.
"""

import builtins
import collections
import collections.abc
import contextlib
import ctypes
import itertools
import json
import os
import resource
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program waits for each import
    from typing import Any

PACKAGES = "/packages"
SET_DEATH_SIGNAL, SET_DUMPABLE = 1, 4
"""`prctl(2)`; 0 keeps processes of the same user out of `/proc/PID/mem` and `/proc/PID/fd`."""
LONGEST_VALUE = 16 * 2**20
"""Maximum bytes of a call's result."""
MOST_ITERATED = 10_000
"""Values that are taken of an iterator, which may never end."""
LONGEST_EXCERPT, LAST_LINES = 200, 12
"""Characters of an invalid row in a report; lines of a traceback."""
LOOK_SECONDS = 0.2
"""Interval at which the program's liveness is polled."""


# --- serialization -----------------------------------------------------------------------------------------------------


def encode(value):
    """Convert a value of a supported type to JSON. Subclasses are converted to their base class, numpy numbers to Python's, iterators to
    their next values.

    Raises:
        TypeError: its type is not supported.
    """
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or type(value) in (bool, str) else str(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    for kind, one in numbers().items():
        if isinstance(value, one):
            return {kind: str(one(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    for kind, one in COLLECTIONS.items():
        if isinstance(value, one):
            return {kind: [encode(inner) for inner in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(inner)] for key, inner in value.items()]}
    if isinstance(value, range):
        return {"range": [hex(part) for part in (value.start, value.stop, value.step)]}
    for kind, (one, _) in VIEWS.items():
        if isinstance(value, one):
            return {kind: [encode(inner) for inner in value]}
    if isinstance(value, collections.abc.Iterator):
        return {"iterator": [encode(inner) for inner in itertools.islice(value, MOST_ITERATED)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no value of the usual types")


def decode(given) -> "Any":
    """Inverse of `encode`. What is no list does not become one, so that it equals none."""
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "int":
        return int(inner, 16)
    if kind in NUMBERS:
        return numbers()[kind](inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decode(one) for one in inner)
    if kind == "range":
        return range(*(int(part, 16) for part in inner))
    if kind in VIEWS:
        return VIEWS[kind][1]([decode(one) for one in inner])
    if kind == "iterator":
        return (decode(one) for one in inner)
    return {decode(key): decode(one) for key, one in inner}


NUMBERS = ("float", "complex", "decimal", "fraction")
COLLECTIONS: "dict[str, Any]" = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
VIEWS: "dict[str, tuple[Any, Any]]" = {
    "keys": (collections.abc.KeysView, lambda keys: dict.fromkeys(keys).keys()),
    "values": (collections.abc.ValuesView, lambda values: dict(enumerate(values)).values()),
    "items": (collections.abc.ItemsView, lambda items: dict(items).items()),
}
"""Kind → type, and how it is made of its values."""


def numbers() -> "dict[str, Any]":
    """Types of numbers; the modules of two are slow to load."""
    import decimal
    import fractions

    return dict(zip(NUMBERS, (float, complex, decimal.Decimal, fractions.Fraction), strict=True))


# --- the program -------------------------------------------------------------------------------------------------------


class Fork:
    """The process of the program, or of one program after another, forked before this process knows the tests.

    It reads a letter: `f` makes it a program that answers calls (`serve`); `s` makes it fork a process that reads a script and its input
    (`run_script`), and report how that ended. The script prints into a file in memory that this process reads.
    """

    def __init__(self, limits):
        theirs, requests = os.pipe()
        answers, ours = os.pipe()
        self.output = os.memfd_create("output")
        self.child = os.fork()
        if self.child:
            os.close(theirs)
            os.close(ours)
            self.requests, self.answers = os.fdopen(requests, "wb"), answers
            return
        os.close(requests)
        os.close(answers)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the files of the order and of the verdict
            os.dup2(nothing, stream)
        os.close(nothing)
        while (what := os.read(theirs, 1)) == b"s":
            child = os.fork()
            if not child:
                os.close(ours)
                run_script(theirs, self.output)
                sys.exit()  # as at the end of any script
            status, used = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), resource.getrusage(resource.RUSAGE_CHILDREN)
            os.write(ours, f"{status} {used.ru_utime + used.ru_stime}\n".encode())
        if not what:
            os._exit(0)
        os.close(self.output)
        serve(limits, os.fdopen(theirs, "rb"), os.fdopen(ours, "wb"))

    def tell(self, *parts):
        try:
            for part in parts:
                self.requests.write(part)
            self.requests.flush()
        except BrokenPipeError:
            raise Ended("the program has ended") from None

    def line(self, pending=b""):
        """The next line from it, and what follows. The program's leftover processes may keep its pipe open after it has ended."""
        while b"\n" not in pending:
            if not select.select([self.answers], [], [], LOOK_SECONDS)[0] and not os.waitpid(self.child, os.WNOHANG)[0]:
                continue
            read = os.read(self.answers, 2**20) if select.select([self.answers], [], [], 0)[0] else b""
            if not read:
                raise Ended("the program has ended")
            pending += read
            if len(pending) > LONGEST_VALUE:
                raise Ended(f"the program's answer has more than {LONGEST_VALUE} bytes")
        line, _, pending = pending.partition(b"\n")
        return line, pending


def serve(limits, questions, answers):
    """Run the program and answer calls, one line each, until the input ends."""
    limit(limits)
    order = json.loads(questions.readline())
    namespace = module("program").__dict__
    try:
        exec(compile(order["program"], "program", "exec"), namespace)
        reply = {"value": None}
    except BaseException as error:
        reply = raised(error)
    while True:
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        line = questions.readline()
        if not line:
            os._exit(0)
        try:
            given: Any = decode(json.loads(line))
            value = namespace[order["entry"]](*given[0], **given[1])
            reply = {"value": encode([value, given if value is None else None])}
        except BaseException as error:  # also SystemExit: it ends the call, not the program
            reply = raised(error)


def module(name) -> "Any":
    """A new module that is imported, as dataclasses and type hints look for it."""
    made = type(sys)(name)
    sys.modules[name] = made
    return made


def raised(error):
    """An exception by its builtin classes, the nearest one first."""
    return {"raised": [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"], "said": message_of(error)}


def message_of(error):
    try:
        return str(error)[:200]
    except BaseException:
        return ""


# --- the tests ---------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The program has ended, or sent an invalid answer."""


class Program:
    """Proxy of the function under test."""

    def __init__(self, order, fork):
        self.fork, self.pending = fork, b""
        self.fork.tell(b"f")
        self._tell({"program": after(order["before"], order["program"]), "entry": order["entry"]})
        self._answer()

    def __call__(self, *arguments, **named):
        """Call it. If it returns None, the arguments change in place as in the program; others cannot change what the tests expect."""
        self._tell(encode([arguments, named]))
        value, given = decode(self._answer())
        if value is None:
            for old, new in zip((*arguments, *named.values()), (*given[0], *given[1].values()), strict=True):
                if isinstance(old, list):
                    old[:] = new
                elif isinstance(old, (dict, set)):
                    old.clear()
                    old.update(new)
        return value

    def _tell(self, message):
        self.fork.tell(json.dumps(message).encode() + b"\n")

    def _answer(self):
        line, self.pending = self.fork.line(self.pending)
        try:
            answer = json.loads(line)
            if set(answer) == {"value"}:
                return answer["value"]
            kinds, text = [str(kind) for kind in answer["raised"]], str(answer["said"])
            unknown = RuntimeError(f"{kinds[0]}: {text}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Ended("the program's answer is none") from None
        raise next(filter(None, (error_of(kind, text) for kind in kinds)), unknown)


def error_of(kind, text):
    """A builtin exception, or None if there is none of this name, or it takes other arguments than a text."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):
            return known(text)
    return None


def after(before, program):
    """A program after the beginning of the prompt; imports from `__future__` must precede both."""
    lines = program.splitlines(keepends=True)
    future = [line for line in lines if line.startswith("from __future__ ")]
    return "".join([*future, before, *(line for line in lines if line not in future)])


def test(order, fork, tell):
    """Run the tests against the program, or the program on the examples, and report a verdict."""
    try:
        run_examples(order, fork) if order["examples"] else run_tests(order, fork)
    except BaseException as error:
        tell({"wrong": f"{type(error).__name__}: {message_of(error)}"[:300]})
    else:
        tell({"right": True})
    os._exit(0)


def run_tests(order, fork):
    namespace = module("tests").__dict__
    with contextlib.suppress(Exception):  # helpers that the prompt defines; it may be incomplete as a program
        exec(compile(order["before"], "before", "exec"), namespace)
    program = Program(order, fork)
    namespace[order["entry"]] = namespace["candidate"] = program
    exec(compile(order["tests"], "tests", "exec"), namespace)
    if callable(namespace.get("check")):
        namespace["check"](program)


def run_examples(order, fork):
    """Run the program on each input, in a new process that sees only this input; outputs are equal up to white space at ends of lines."""
    program, left = order["program"].encode(), order["limits"]["RLIMIT_CPU"]
    for number, example in enumerate(order["examples"], start=1):
        assert left > 0, f"no CPU time left for example {number}"
        os.ftruncate(fork.output, 0)
        os.lseek(fork.output, 0, os.SEEK_SET)
        given = example["input"].encode()
        fork.tell(b"s", f"{left} {len(program)} {len(given)}\n".encode(), program, given)
        status, used = fork.line()[0].split()
        assert status == b"0", f"example {number} ended with status {int(status)}"
        left = order["limits"]["RLIMIT_CPU"] - int(float(used))
        found = os.pread(fork.output, os.fstat(fork.output).st_size, 0).decode(errors="replace")
        assert lines_of(found) == lines_of(example["output"]), f"example {number} printed {found[:100]!r}"


def lines_of(text):
    return [line.rstrip() for line in text.strip().splitlines()]


def run_script(requests, output):
    """Read a program and its input, and run it as a script, with this as its standard input."""
    with os.fdopen(requests, "rb") as stream:
        seconds, size, length = map(int, stream.readline().split())
        source, given = stream.read(size), os.memfd_create("input")
        os.write(given, stream.read(length))
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.dup2(output, 1)
    os.close(given)
    os.close(output)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # which counts the process that forked this one
    builtins.exit = builtins.quit = sys.exit  # as in an interpreter with `site`
    exec(compile(source, "program", "exec"), module("__main__").__dict__)


# --- rows --------------------------------------------------------------------------------------------------------------


def make_rows(order, write):
    """Call a program's function and write its rows, at most `count`."""
    try:
        made = function_of(order)(count=order["count"], seed=order["seed"], **order["arguments"])
        for row in itertools.islice(made, order["count"]):
            write(line_of(row))
    except BaseException as error:  # also SystemExit: reported to the caller
        write(json.dumps({"raised": last_words(error)}))
    else:
        write(json.dumps({"end": True}))
    os._exit(0)


def function_of(order) -> "Any":
    """Run a file as a module and return its function.

    Raises:
        NameError: it has no such function.
    """
    import linecache

    name, source = order["name"], order["program"]
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for tracebacks
    made = module(name.partition(".")[0])
    exec(compile(source, name, "exec"), made.__dict__)
    function = getattr(made, order["function"], None)
    if not callable(function):
        raise NameError(f"{name} has no function {order['function']!r}")
    return function


def line_of(row):
    """A row as a JSON line, or a report of why it is invalid."""
    if not isinstance(row, dict):
        return bad(row, f"is a {type(row).__name__}, and a row is a mapping from columns to values")
    try:
        text = json.dumps(row, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return bad(row, f"is not JSON: {message_of(error)}")
    if len(text) > LONGEST_VALUE:
        return bad(row, f"has {len(text)} characters as JSON, {LONGEST_VALUE} at most")
    return f'{{"row": {text}}}'


def bad(row, reason):
    return json.dumps({"bad": reason, "text": excerpt(row)})


def excerpt(row):
    """The beginning of a row, without parts that differ between runs, such as memory addresses."""
    try:
        return json.dumps(row, default=lambda value: f"<{type(value).__name__}>")[:LONGEST_EXCERPT]
    except (TypeError, ValueError, RecursionError):
        return ""


def last_words(error):
    """The last lines of a traceback, without the runner's own frames."""
    import traceback

    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    lines = "".join(traceback.format_exception(type(error), error, inner)).splitlines()
    return "\n".join(lines[-LAST_LINES:])


# --- rewards -----------------------------------------------------------------------------------------------------------


def give_rewards(order, requests, write):
    """Load a reward function, then answer lines of batches with a line of rewards for each batch; one that is `async` has the batches of
    a line together.

    A reward is a finite number, None where the function leaves an answer out, or a text: why it is unknown.
    """
    import asyncio  # slow to load, and the tests of a program do not need it
    import inspect

    try:
        function = function_of(order)
        taken = passed(inspect.signature(function), order["passed"])
    except BaseException as error:  # also SystemExit: reported to the caller
        write(json.dumps({"raised": last_words(error)}))
        os._exit(0)
    concurrent = inspect.iscoroutinefunction(function)
    write(json.dumps({"taken": taken, "concurrent": concurrent}))
    for line in requests:
        batches = [[RewardCall(function, **call) for call in calls] for calls in json.loads(line)]
        made = asyncio.run(together(batches, asyncio.gather)) if concurrent else map(in_turn, batches)
        for rewards in made:
            write(json.dumps({"rewards": rewards}))
    os._exit(0)


def passed(signature, names):
    """Those of the names that a function of this signature takes as keyword arguments.

    Raises:
        TypeError: it requires others.
    """
    takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    taken = [name for name in names if takes_all or name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(taken))
    except TypeError as error:
        raise TypeError(f"{error}; its arguments may be {', '.join(names)}") from None
    return taken


class RewardCall:
    """One call of a reward function, for several answers, or for a single one if `size` is null."""

    def __init__(self, function, arguments, size: "Any"):
        self.function, self.arguments, self.size = function, arguments, size

    def rewards(self):
        try:
            return self.checked(self.function(**self.arguments))
        except BaseException as error:  # also SystemExit: it ends the call, not the process
            return self.unknown(error)

    async def rewards_later(self):
        try:
            return self.checked(await self.function(**self.arguments))
        except BaseException as error:
            return self.unknown(error)

    def checked(self, made):
        values = [made.get("score") if isinstance(made, dict) else made] if self.size is None else list(made)
        if len(values) != (self.size or 1):
            return [f"returned {len(values)} rewards for {self.size} answers"] * (self.size or 1)
        return [number_of(value) for value in values]

    def unknown(self, error):
        return [last_words(error)] * (self.size or 1)


def in_turn(calls):
    return [reward for call in calls for reward in call.rewards()]


async def together(batches, gather):
    made = await gather(*(call.rewards_later() for calls in batches for call in calls))
    found = iter(made)
    return [[reward for _ in calls for reward in next(found)] for calls in batches]


NAN, INFINITY = float("nan"), float("inf")


def number_of(value):
    if value is None:
        return None
    try:
        number = NAN if isinstance(value, (str, bytes)) else float(value)
    except BaseException:
        number = NAN
    return number if abs(number) < INFINITY else f"returned {excerpt(value)}, and a reward is a finite number"


# --- environments ------------------------------------------------------------------------------------------------------


def hold_conversations(order, requests, write):
    """Load a file with an environment, then answer each line with the reaction of its conversation's own object."""
    import inspect

    try:
        make = function_of(order)
        one = make()
        missing = next((name for name in ("reset", "step") if not callable(getattr(one, name, None))), None)
        if missing:
            raise NameError(f"{order['function']} has no method {missing!r}")
        taken = passed(inspect.signature(one.reset), order["passed"])
    except BaseException as error:  # also SystemExit: reported to the caller
        write(json.dumps({"raised": last_words(error)}))
        os._exit(0)
    write(json.dumps({"taken": taken}))
    conversations = {}
    for line in requests:
        asked = json.loads(line)
        for number in asked["ended"]:
            conversations.pop(number, None)
        try:
            if asked["start"] is not None:
                conversations[asked["number"]] = make()
                reaction = begun(conversations[asked["number"]].reset(**asked["start"]))
            else:
                reaction = stepped(conversations[asked["number"]].step(asked["answer"]))
            reply = json.dumps(reaction)
        except BaseException as error:  # also SystemExit: it ends the conversation, not the process
            reply = json.dumps({"raised": last_words(error)})
        write(reply)
    os._exit(0)


def begun(made):
    """The result of `reset`: messages to ask, a text to append, or neither."""
    return {"messages": made if made is None or isinstance(made, str) else messages_of(made, ("system", "user", "assistant", "tool"))}


def stepped(made):
    """The result of `step`.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        raise TypeError(f"step returned {excerpt(made)}, and must return (observation, reward, done)")
    observation, reward, done = made
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    reward = number_of(reward)
    if isinstance(reward, str):
        raise ValueError(reward)
    return {"messages": [] if done else messages_of(observation, ("user", "tool")), "reward": reward, "done": bool(done)}


def messages_of(given, roles):
    """Checked messages of these roles."""
    found = [{"role": one["role"], "content": one["content"]} for one in given or ()]
    if not found or any(one["role"] not in roles or not isinstance(one["content"], str) for one in found):
        raise ValueError(f"{excerpt(given)} is neither a text nor a list of messages with role {' or '.join(roles)}, and not done")
    return found


# --- limits ------------------------------------------------------------------------------------------------------------

DENIED = {
    "x86_64": (
        0xC000003E,  # AUDIT_ARCH_X86_64
        (41, 101, 155, 165, 166, 248, 249, 250, 272, 298, 308, 310, 311, 321, 323, 425),
        56,
    ),
    "aarch64": (
        0xC00000B7,  # AUDIT_ARCH_AARCH64
        (198, 117, 41, 40, 39, 217, 218, 219, 97, 241, 268, 270, 271, 280, 282, 425),
        220,
    ),
}
"""Processor → (audit architecture; numbers of socket, ptrace, pivot_root, mount, umount2, add_key, request_key, keyctl, unshare,
perf_event_open, setns, process_vm_readv, process_vm_writev, bpf, userfaultfd, io_uring_setup; clone, denied with namespace flags)."""
CLONE3, NEW_NAMESPACES = 435, 0x7E020000
EPERM, ENOSYS = 1, 38
LOAD, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2


class _Instruction(ctypes.Structure):
    """`struct sock_filter`."""

    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def refuse_calls():
    """Deny system calls that reach the network, other processes or new namespaces (seccomp-BPF). No effect on processors other than x86-64
    and ARM64, where only the namespaces isolate a program.

    Raises:
        OSError: the kernel rejects the filter.
    """
    if os.uname().machine not in DENIED:
        return
    audit, numbers, clone = DENIED[os.uname().machine]
    filters = [(LOAD, 0, 0, 4), (EQUALS, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    filters += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 ABI
    for number in numbers:
        filters += [(EQUALS, 0, 1, number), (RETURN, 0, 0, REFUSE | EPERM)]
    filters += [(EQUALS, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | ENOSYS)]  # its flags cannot be read here; libraries fall back to clone
    filters += [(EQUALS, 0, 3, clone), (LOAD, 0, 0, 16), (HAS_BITS, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, REFUSE | EPERM)]
    filters += [(RETURN, 0, 0, ALLOW)]
    instructions = (_Instruction * len(filters))(*(_Instruction(*one) for one in filters))
    program = _Program(len(filters), instructions)
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if library.prctl(SET_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero) or library.prctl(
        SET_SECCOMP, ctypes.c_ulong(FILTER), ctypes.byref(program), zero, zero
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def limit(limits):
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value + (name in ("RLIMIT_CPU", "RLIMIT_NPROC"))))


def confine(user, limits):
    if user is not None:  # root has no process limit
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    refuse_calls()
    limit(limits)


def main():
    mode, user, limits = sys.argv[1], *json.loads(sys.argv[2])
    if mode != "rows":
        sys.path.append(PACKAGES)
    confined, fork = limits is not None, None  # a trusted file is run outside any sandbox, and its output is logged
    if confined:
        confine(user, limits)
    else:
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if mode == "tests":
        fork = Fork(limits)
    pipe, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0), "rb")
    order = json.loads(requests.readline())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2) if confined else (0,):
        os.dup2(nothing, stream)
    if not confined:
        os.dup2(2, 1)

    def write(text):
        pipe.write(f"{order['word']}{text}\n")
        pipe.flush()

    def tell(message):
        write(json.dumps(message))

    tell({"started": True})
    if mode == "rows":
        make_rows(order, write)
    if mode == "rewards":
        give_rewards(order, requests, write)
    if mode == "environment":
        hold_conversations(order, requests, write)
    test({**order, "limits": limits}, fork, tell)


if __name__ == "__main__":
    main()
