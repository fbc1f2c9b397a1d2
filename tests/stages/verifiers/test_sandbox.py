"""Programs that mean harm: what each tries, and that it is wrong, harmless and soon over."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from waiting import until

from pedigree.configs.base import problems, texts
from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.verifiers import VerifierError, sandbox, verify
from pedigree.stages.verifiers.programs import code_of

locked = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
HEAD = 'def twice(x):\n    """Two times x."""\n'
TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == [1, 1]\n"


def score(program: str, *, before: str = HEAD, tests: str = TESTS, entry: str = "twice", seconds: int = 1):
    return verify({"name": "python", "before": before, "tests": tests, "entry": entry, "seconds": seconds}, program)


RUN = """
import json, sys
from pedigree.stages.verifiers import sandbox
sandbox.IDLE_SECONDS, inside, *order = json.load(sys.stdin)
sandbox.RUNNER_INSIDE = sandbox.Path(inside)
sandbox.SLACK = sandbox.STARTUP_SECONDS = 600
json.dump(sandbox.run(*order), sys.stdout)
"""
ROOT = Path(__file__).parents[3]
ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")


@pytest.fixture(autouse=True, scope="module")
def runner_of_our_own():
    """By its name, sandboxes of this process are told from all others of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "RUNNER_INSIDE", Path(f"/runner-{os.getpid()}.py"))
        yield


@pytest.fixture(scope="module")
def by_ordinary_user():
    """Runs programs as a user without any rights: the sandbox's own files lie where anybody may read them, as does the interpreter."""
    if os.geteuid() != 0:
        pytest.skip("this user is an ordinary one")
    bubblewrap = sandbox.program()
    assert bubblewrap is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(bubblewrap, folder / "bwrap")
        for file in map(Path, (sandbox.__file__, sandbox.RUNNER, problems.__file__, texts.__file__)):
            where = folder / file.parent.relative_to(ROOT)
            where.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, where)
        for path in folder.rglob("*"):
            path.chmod(0o755)  # whatever the umask
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": name}
        candidates = (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")
        may = "import sys; open(sys.executable, 'rb')"
        tried = (subprocess.run([*ORDINARY, one, "-c", may], cwd=name, capture_output=True, check=False) for one in candidates)
        python = next((one.args[len(ORDINARY)] for one in tried if one.returncode == 0), None)
        if python is None:
            pytest.fail(f"an ordinary user may run none of {', '.join(candidates)}: install a Python that all may read")

        def outcome(program: str, tests: str) -> sandbox.Outcome:
            order = json.dumps([sandbox.IDLE_SECONDS, str(sandbox.RUNNER_INSIDE), HEAD, program, tests, "twice", 1])
            command = [*ORDINARY, python, "-B", "-c", RUN]
            done = subprocess.run(command, input=order, cwd=name, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return sandbox.Outcome(*json.loads(done.stdout))

        assert outcome("    return 2 * x\n", TESTS).right
        yield outcome


@pytest.fixture(params=["this user", "an ordinary user"])
def outcome_of(request):
    """Runs a program with its tests, as whoever runs this; where that is root, as a user without any rights too."""
    if request.param == "this user":
        return lambda program, tests: sandbox.run(HEAD, program, tests, "twice", 1)
    return request.getfixturevalue("by_ordinary_user")


@locked
def test_a_right_program_passes_and_a_wrong_one_does_not():
    assert score("    return 2 * x\n").score == 1
    wrong = score("    return 3 * x\n")
    assert (wrong.score, wrong.reason) == (0, "AssertionError: ")
    assert score("    return x.nothing\n").reason.startswith("AttributeError: 'int' object has no attribute 'nothing'")
    assert score("    return (\n").reason.startswith("SyntaxError")
    assert score("    raise ValueError('\\ud83d')\n").reason == "ValueError: ?"  # which a file can hold


@locked
def test_helpers_of_the_prompt_serve_program_and_tests_and_values_of_all_usual_types_pass():
    before = "from fractions import Fraction\nimport math\n\ndef half(x):\n    return x / 2\n\n"
    program = "def echo(*values, **named):\n    return (half(4), *values, named)\n"
    values = "1, -2**80, 2.5, math.inf, 1j, 'é', b'\\0', None, True, [1, (2, 3)], {1, 2}, {'a': {2: [3]}}, Fraction(1, 3)"
    tests = f"values = ({values})\nassert candidate(*values, key=[1]) == (half(4), *values, {{'key': [1]}})\nassert half(3) == 1.5\n"
    assert score(program, before=before, tests=tests, entry="echo").reason == "right"


@locked
def test_numbers_of_numpy_and_subclasses_are_values():
    program = "import numpy, collections\ndef f():\n    return numpy.float64(0.5), collections.OrderedDict(a=numpy.arange(2))\n"
    assert score(program, before="", tests="import numpy\nassert f() == (0.5, {'a': [0, 1]})", entry="f", seconds=5).reason == "right"


DATACLASS = "from dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: 'int'\n    y: 'Point | None' = None\n\n"
HINTS = "import typing\n\ndef twice(x):\n    assert typing.get_type_hints(Point)['x'] is int\n    return 2 * Point(x).x\n"
FUTURE = "from __future__ import annotations\n"


@locked
@pytest.mark.parametrize("program", [DATACLASS + HINTS, FUTURE + DATACLASS.replace("'", "") + HINTS], ids=["texts", "future"])
def test_classes_with_annotations_find_their_module(program):
    tests = "assert twice(2) == 4"
    assert score(program, before="", tests=tests).reason == "right"
    assert score(program, before="import math\n", tests=tests).reason == "right"
    assert score("def twice(x):\n    return 2 * x\n", before=DATACLASS, tests="assert twice(Point(2).x) == 4").reason == "right"
    script = f"{program}\nprint(twice(int(input())))\n"
    assert verify({"name": "python", "examples": [{"input": "2", "output": "4"}], "seconds": 5}, script).reason == "right"


LAZY = [
    ("yield from range(x)", "list(f(3)) == [0, 1, 2]"),
    ("yield from range(x)", "next(f(3)) == 0 and sum(f(4)) == 6"),
    ("while True:\n        yield x", "(lambda made: [next(made) for _ in range(3)])(f(7)) == [7, 7, 7]"),
    ("return map(abs, x)", "sorted(f([-1, 0])) == [0, 1]"),
    ("return zip(x, x)", "dict(f([1, 2])) == {1: 1, 2: 2}"),
    ("return range(x)", "f(3) == range(3) and list(f(3)) == [0, 1, 2] and len(f(10**9)) == 10**9"),
    ("return x.keys()", "set(f({'a': 1})) == {'a'} and f({'a': 1}) == {'a'}"),
    ("return x.values()", "sorted(f({'a': 1, 'b': 1})) == [1, 1]"),
    ("return x.items()", "list(f({'a': [1]})) == [('a', [1])]"),
    ("import collections\n    return collections.deque(x)", "list(f([1, 2])) == [1, 2] and f([1])[0] == 1"),
    ("return sum(x)", "f(range(4)) == f(one for one in range(4)) == f({1: 2, 5: 3}.keys()) == 6"),
    ("return [range(2), iter(x)]", "[list(one) for one in f([5])] == [[0, 1], [5]]"),
]
NO_LISTS = ("yield from x", "return range(0, 1)", "return {0: 1}.keys()", "return {0: 0}.values()", "return iter(x)")


@locked
@pytest.mark.parametrize(("body", "claim"), LAZY)
def test_iterators_ranges_and_views_are_values(body, claim):
    assert score(f"def f(x):\n    {body}\n", before="", tests=f"assert {claim}", entry="f").reason == "right"


@locked
@pytest.mark.parametrize("body", NO_LISTS)
def test_what_is_no_list_equals_none(body):
    assert score(f"def f(x):\n    {body}\n", before="", tests="assert f([0]) == [0]", entry="f").reason == "AssertionError: "
    assert score(f"def f(x):\n    {body}\n", before="", tests="assert list(f([0])) == [0]", entry="f").reason == "right"


@locked
@pytest.mark.parametrize(
    ("raising", "expected"),
    [
        ("class Own(ValueError): pass\n    raise Own('no')", "ValueError"),
        ("class Own(KeyError): pass\n    class More(Own): pass\n    raise More('no')", "LookupError"),
        ("import json\n    json.loads('no')", "ValueError"),
        ("b'\\xff'.decode()", "ValueError"),  # UnicodeDecodeError takes more than a text
        ("raise TypeError('no')", "TypeError"),
    ],
)
def test_an_exception_reaches_the_tests_as_its_nearest_builtin_class(raising, expected):
    tests = f"try:\n    f()\nexcept {expected}:\n    pass\nelse:\n    raise AssertionError\n"
    assert score(f"def f():\n    {raising}\n", before="", tests=tests, entry="f").reason == "right"
    assert score(f"def f():\n    {raising}\n", before="", tests=tests.replace(expected, "OSError"), entry="f").score == 0


@locked
def test_an_expected_exception_reaches_the_tests():
    tests = "try:\n    f()\nexcept KeyError as error:\n    assert 'gone' in str(error)\nelse:\n    raise AssertionError\n"
    assert score("def f():\n    raise KeyError('gone')\n", before="", tests=tests, entry="f").score == 1
    for error in ("TypeError", "ValueError", "ZeroDivisionError"):
        tests = f"try:\n    f()\nexcept {error}:\n    pass\nelse:\n    raise AssertionError\n"
        assert score(f"def f():\n    raise {error}('x')\n", before="", tests=tests, entry="f").score == 1
    tests = "try:\n    f()\nexcept KeyError as error:\n    pass\n"
    assert score("def f():\n    raise ValueError\n", before="", tests=tests, entry="f").score == 0


@locked
def test_arguments_change_in_place_where_nothing_is_returned():
    assert score("def f(x, y):\n    x.sort()\n    y['a'][0] = 2\n", before="", tests=IN_PLACE, entry="f").reason == "right"
    assert score("def f(x, y):\n    pass\n", before="", tests=IN_PLACE, entry="f").score == 0
    empties = "def f(x):\n    x.clear()\n    return []\n"
    assert score(empties, before="", tests="x = [2, 1]\nassert f(x) == sorted(x)", entry="f").score == 0


TWO_TESTS = "assert candidate(2) == 4\nassert candidate(3) == 6\n"
IN_PLACE = "x, y = [2, 1], {'a': [1]}\nassert f(x, y=y) is None and (x, y) == ([1, 2], {'a': [2]})"
FORGERIES = {
    "exit 0 before the tests": "    return 0\nimport sys\nsys.exit(0)\n",
    "exit at once": "    return 0\nimport os\nos._exit(0)\n",
    "exit in the call": "    import os\n    os._exit(0)\n",
    "equals everything": "    class Yes:\n        __eq__ = lambda *_: True\n        __hash__ = None\n    return Yes()\n",
    "an int that equals everything": "    class Yes(int):\n        __eq__ = lambda *_: True\n    return Yes(7)\n",
    "says that it is right": "    return 0\nimport os\nfor fd in range(64):\n    try:\n        os.write(fd, b'{\"right\": true}\\n')\n"
    "    except OSError:\n        pass\n",
    "patches assert away": "    return 0\nimport builtins, sys\nbuiltins.AssertionError = SystemExit\nsys.settrace(None)\n",
    "takes the tests' place": "    return 0\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "reads the tests' memory": "    import os\n    open(f'/proc/{os.getppid()}/mem', 'r+b').close()\n    return 2 * x\n",
    "reads the first process's memory": "    open('/proc/1/mem', 'r+b').close()\n    return 2 * x\n",
    "opens the tests' pipe": "    import os\n    os.listdir(f'/proc/{os.getppid()}/fd')\n    return 2 * x\n",
    "writes to the tests' pipes": "    return 0\nimport os\nfor place in ('1', os.getppid()):\n    for fd in range(16):\n        try:\n"
    "            open(f'/proc/{place}/fd/{fd}', 'w').write('{\"right\": true}\\n')\n        except OSError:\n            pass\n",
    "writes to the first process's pipe": "    open('/proc/1/fd/1', 'w').write('{\"right\": true}\\n')\n    return 0\n",
    "an answer in its own words": '    import os\n    os.write(4, b\'{"value": {"int": "0x4"}}\\n\' * 9)\n    return 0\n',
}
OUTWARD = ("/proc", "getppid", "os.write")
"""Ways of a forgery to the process of the tests."""


@locked
@pytest.mark.parametrize("how", FORGERIES)
def test_no_program_can_forge_a_verdict(how):
    assert not sandbox.run(HEAD, FORGERIES[how], TWO_TESTS, "twice", 1).right


@locked
@pytest.mark.parametrize("how", [how for how, program in FORGERIES.items() if any(way in program for way in OUTWARD)])
def test_no_program_of_an_ordinary_user_reaches_the_process_of_its_tests(how, by_ordinary_user):
    assert not by_ordinary_user(FORGERIES[how], TWO_TESTS).right


@locked
def test_a_fork_bomb_is_contained():
    program = "    import os\n    while True:\n        try:\n            os.fork()\n        except OSError:\n            pass\n"
    assert score(program).score == 0
    until(lambda: not sandboxed_processes())


@locked
def test_processes_are_limited_to_a_few():
    program = (
        "    import os, time\n    made = 0\n    while made < 100:\n        try:\n            child = os.fork()\n        except OSError:\n"
        "            return made\n        if not child:\n            time.sleep(60)\n        made += 1\n    return made\n"
    )
    assert score(program, tests="assert 1 <= candidate(0) <= 8, candidate(0)").reason == "right"


@locked
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"    import socket\n    socket.create_connection(('127.0.0.1', {port}), timeout=2)\n    return 'connected'\n"
        assert score(program, tests="assert candidate(0) == 'connected'").score == 0
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    listing = "    return [line.split(':')[0].strip() for line in open('/proc/net/dev').read().splitlines()[2:]]\n"
    assert score(listing, tests="assert set(candidate(0)) <= {'lo'}").reason == "right"


CALLS = (
    "library.unshare(0x10000000)",  # CLONE_NEWUSER
    "library.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "library.ptrace(0, 0, None, None)",
    "library.socket(1, 1, 0)",
    "library.syscall(425, 1, None)",  # io_uring_setup
)


@locked
def test_system_calls_that_lead_out_are_refused():
    program = "    import ctypes\n    library, found = ctypes.CDLL(None, use_errno=True), []\n"
    program += (
        "".join(f"    found.append(({call}, ctypes.get_errno()))\n    ctypes.set_errno(0)\n" for call in CALLS) + "    return found\n"
    )
    assert score(program, tests=f"assert candidate(0) == [(-1, 1)] * {len(CALLS)}, candidate(0)").reason == "right"


@locked
def test_threads_and_processes_of_ones_own_are_fine():
    program = (
        "    import subprocess, sys, threading\n    found = []\n    thread = threading.Thread(target=lambda: found.append(1))\n"
        "    thread.start()\n    thread.join()\n"
        "    return found, subprocess.run([sys.executable, '-I', '-S', '-c', 'print(7)'], capture_output=True).stdout\n"
    )
    assert score(program, tests="assert candidate(0) == ([1], b'7\\n')", seconds=5).reason == "right"


@locked
def test_nothing_outside_is_written(outcome_of):
    program = (
        "    written = []\n    for place in '/usr /. /python /packages /runner.py /dev /dev/shm /proc'.split():\n        try:\n"
        "            open(place if place.endswith('.py') else place + '/x', 'w').write('x')\n            written.append(place)\n"
        "        except OSError:\n            pass\n    return written\n"
    ).replace("/runner.py", str(sandbox.RUNNER_INSIDE))
    assert outcome_of(program, "assert candidate(0) == [], candidate(0)") == (True, "right")


@locked
def test_files_of_this_machine_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    names = (str(secret), str(tmp_path), "/etc/passwd", "/home", "/root")
    program = f"    import os\n    return [os.path.exists(name) for name in {names}]\n"
    assert score(program, tests="assert not any(candidate(0)), candidate(0)").reason == "right"
    environment = "    import os\n    return dict(os.environ)\n"
    assert score(environment, tests="assert not {'PYTHONPATH', 'SECRET', 'USER'} & set(candidate(0))").reason == "right"


@locked
def test_there_is_a_small_place_to_write():
    program = "    open('note', 'w').write('x' * 1000)\n    return len(open('note').read())\n"
    assert score(program, tests="assert candidate(0) == 1000").score == 1
    fill = "    for number in range(20):\n        open(str(number), 'w').write('x' * 15_000_000)\n    return 4\n"
    assert score(fill, tests="assert candidate(0) == 4", seconds=5).score == 0


@locked
def test_memory_is_limited():
    verdict = score("    return len(bytearray(4 * 2**30))\n", tests="assert candidate(0)")
    assert verdict.score == 0 and "MemoryError" in verdict.reason


@locked
def test_an_endless_loop_ends():
    assert score("    while True:\n        pass\n").score == 0


@locked
def test_a_program_that_sleeps_ends(monkeypatch, outcome_of):
    monkeypatch.setattr(sandbox, "IDLE_SECONDS", 1.0)
    assert outcome_of("    import time\n    time.sleep(10**6)\n", TESTS) == (False, "waited for 1 s without work")
    until(lambda: not sandboxed_processes())


@locked
def test_a_program_that_works_for_longer_than_it_may_sleep_is_right(monkeypatch):
    """The time that it computes, or that its own processes do, is no time without work."""
    monkeypatch.setattr(sandbox, "IDLE_SECONDS", 2.0)
    spin = "import time\nwhile time.process_time() < 2.5:\n    pass\n"
    assert score(f"    exec({spin!r})\n    return 2 * x\n", seconds=10).reason == "right"
    program = (
        f"import subprocess, sys\nfor _ in range(2):\n    subprocess.run([sys.executable, '-I', '-S', '-c', {spin!r}])\nprint(input())\n"
    )
    examples = [{"input": "a", "output": "a"}]
    assert verify({"name": "python", "examples": examples, "seconds": 10}, program).reason == "right"


EXAMPLES = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}]
SCRIPTS = [
    ("print(sum(map(int, input().split())))", "right"),
    ("def main():\n    print(sum(map(int, input().split())), ' ')\n\nif __name__ == '__main__':\n    main()", "right"),
    ("import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.read().split()))) + '\\n\\n')\nsys.exit()", "right"),
    ("print(3)", "AssertionError: example 2 printed '3\\n'"),
    ("print(int(input().split()[0]) + 2)\nraise SystemExit(1)", "AssertionError: example 1 ended with status 1"),
    ("print(3); print(4)", "AssertionError: example 1 printed '3\\n4\\n'"),
    ("print(sum(map(int, input().split())))\nexit()", "right"),
    ("    print(sum(map(int, input().split())))\n    quit(0)", "right"),
    ("", None),
    ("while True:\n    print(3)", "AssertionError: example 1 ended with status -"),
    ("import os\nprint(open(f'/proc/{os.getppid()}/fd/0').read())", "AssertionError: example 1 ended with status 1"),
]


@locked
@pytest.mark.parametrize(("program", "reason"), SCRIPTS)
def test_a_program_prints_the_output_of_each_example(program, reason):
    verdict = verify({"name": "python", "examples": EXAMPLES, "seconds": 1}, f"```python\n{program}\n```")
    assert verdict.score == (reason == "right") and verdict.reason.startswith(reason or "no code")


@locked
def test_a_script_has_its_input_and_output_and_no_open_file_of_the_process_that_forked_it():
    program = (
        "import os\ngiven = input()\n"
        "print(given, sorted(int(name) for name in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{name}')))\n"
    )
    examples = [{"input": str(number), "output": f"{number} [0, 1, 2]"} for number in range(3)]
    assert verify({"name": "python", "examples": examples, "seconds": 5}, program).reason == "right"


@locked
def test_tests_that_do_not_end_are_ended_too(outcome_of):
    assert outcome_of("    return 2 * x\n", "while True:\n    pass\n") == (False, "ended before its tests did")


def sandboxed_processes() -> list[str]:
    """Of all sandboxes that this process has started."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands[folder.name] = (folder / "cmdline").read_bytes()
    return [name for name, command in commands.items() if str(sandbox.RUNNER_INSIDE).encode() in command.split(b"\0")]


@locked
def test_much_output_goes_nowhere_and_a_long_answer_is_wrong():
    program = (
        "    import sys\n    for _ in range(100):\n        sys.stdout.write('x' * 2**20)\n        sys.stderr.write('x' * 2**20)\n"
        "    return 2 * x\n"
    )
    assert score(program, seconds=10).score == 1
    assert score("    return 'x' * 2**25\n", tests="assert candidate(0)", seconds=10).score == 0


@locked
def test_sandboxes_run_side_by_side():
    """Each has a user of its own, so that the processes of one do not count against another's."""
    scores: list[float] = []
    threads = [threading.Thread(target=lambda: scores.append(score("    return 2 * x\n", seconds=5).score)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 6


def test_without_bubblewrap_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox, "program", lambda: None)
    sandbox.require.cache_clear()
    with pytest.raises(PedigreeError, match="apt-get install bubblewrap"):
        score("    return 2 * x\n")
    sandbox.require.cache_clear()


@locked
def test_a_sandbox_that_does_not_come_up_is_unknown_and_not_wrong(monkeypatch):
    sandbox.require()
    monkeypatch.setattr(sandbox, "_command", lambda flags: ((sandbox.program(),), ("--ro-bind", "/nonexistent", "/x", "--", "python")))
    with pytest.raises(VerifierError, match=r"the sandbox did not come up.*nonexistent"):
        score("    return 2 * x\n")


@pytest.mark.parametrize(
    ("text", "opened", "code"),
    [
        ("    return 1\n", True, "    return 1\n"),
        ("    return 1\n```\nThis returns 1.", True, "    return 1\n"),
        ("def f():\n    return 1\n", False, "def f():\n    return 1\n"),
        ("Here it is:\n```python\ndef f():\n    return 1\n```\nand more", False, "def f():\n    return 1\n"),
        ("```\n1 2\n```\n```python\nx = 2\n```\n```python\nx = 3\n```", False, "x = 2\n"),  # a block without a language shows an input
        ("```python\ncut off", False, "cut off\n"),
        ("First:\n```bash\npip install x\n```\nThen:\n```python\ndef f(): ...\n```", False, "def f(): ...\n"),
        ("```python3.11\nx = 1\n```", False, "x = 1\n"),
        ("```PY title=x.py\nx = 1\n```\n", False, "x = 1\n"),
        ("```py\n```\n```py\nx = 1\n```", False, ""),
        ("<think>\n```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", False, "x = 2\n"),
        ("```python\n\ufeffx = 1\n```", False, "x = 1\n"),
        ("```python\nx = 1```\nand more", False, "x = 1\n"),
        ("```python\nx = 1\n``` and more text", False, "x = 1\n"),
        ("```python\nx = 1  # ``` is no fence\ny = 2\n```", False, "x = 1  # ``` is no fence\ny = 2\n"),
        ("Use ```f()``` so: ```python\nx = 1\n```", False, "x = 1\n"),
        ("```python\ndef f():\n    '''\n    ```\n    '''\n```\n", False, "def f():\n    '''\n    ```\n    '''\n"),
        ("```text\n1\n```", False, "```text\n1\n```"),
        ("", False, ""),
        # items of lists, quotations
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n2. Done", False, "def f():\n    return 1\n"),
        ("- ```python\n  x = 1\n  y = 2\n  ```\n", False, "x = 1\ny = 2\n"),
        ("\t```python\n\tif x:\n\t\ty = 1\n\t```", False, "if x:\n\ty = 1\n"),
        ("  ```python\ndef f():\n  return 1\n  ```", False, "def f():\n  return 1\n"),  # only the fences are indented
        ("   ```python\n   x = 1\n\n   y = 2\n   ```", False, "x = 1\n\ny = 2\n"),
        ("```python\n    return 1\n```", False, "    return 1\n"),  # a function's body
        ("1. ```python\n       return 1\n   ```", False, "    return 1\n"),
        ("> ```python\n> def f():\n>     return 1\n> ```\n", False, "def f():\n    return 1\n"),
        # other fences
        ("~~~python\nx = 1\n~~~\nand more", False, "x = 1\n"),
        ("````python\nx = '''\n```\n'''\n````\nand more", False, "x = '''\n```\n'''\n"),
        ("~~~\nx = '```'\n~~~", False, "x = '```'\n"),
        ("```python\nx = 1\n`````\nand more", False, "x = 1\n"),  # a longer fence closes too
        ("```python\nx = '''\n~~~\n'''\n```", False, "x = '''\n~~~\n'''\n"),
        # names of the language
        ("```Python\nx = 1\n```", False, "x = 1\n"),
        ("``` PYTHON3 \nx = 1\n```", False, "x = 1\n"),
        ("```{.python .numberLines}\nx = 1\n```", False, "x = 1\n"),
        ("```pycon\n>>> x\n```\n```python\nx = 1\n```", False, "x = 1\n"),
        # ends of lines
        ("So:\r\n```python\r\ndef f():\r\n    return 1\r\n```\r\nDone", False, "def f():\n    return 1\n"),
        ("    return 1\r\n```\r\nDone", True, "    return 1\n"),
    ],
)
def test_the_code_of_an_answer(text, opened, code):
    assert code_of(text, opened=opened) == code


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([], "every program would pass"),
        ("x", "every program would pass"),
        ([{"input": "1"}], "texts input and output"),
        ([{"input": 1, "output": "1"}], "texts input and output"),
        ([{"input": "1", "output": " "}], "prints nothing would pass"),
    ],
)
def test_malformed_examples_are_refused(examples, problem):
    with pytest.raises(VerifierError, match=problem):
        verify({"name": "python", "examples": examples}, "x = 1")


MALFORMED = [
    ({"entry": "two words"}, "must be the name of a function"),
    ({"tests": " "}, "every program would pass"),
    ({"seconds": 0}, "from 1 to 60"),
    ({"seconds": 1.5}, "from 1 to 60"),
    ({"before": None}, "before must be a text"),
    ({"opened": 1}, "true or false"),
]


@pytest.mark.parametrize(("wrong", "problem"), MALFORMED)
def test_a_malformed_verifier_is_refused(wrong, problem):
    with pytest.raises(VerifierError, match=problem):
        verify({"name": "python", "before": "", "tests": TESTS, "entry": "twice", **wrong}, "x = 1")
