import gc
import importlib
import subprocess
import sys
import threading

import pytest
from waiting import deadline

from pedigree.data.host.process import uncollected, without


def test_what_was_collected_before_is_collected_after():
    with pytest.raises(ValueError, match="ours"), uncollected():
        assert not gc.isenabled()
        raise ValueError("ours")
    assert gc.isenabled()
    with uncollected(), uncollected():
        pass
    assert gc.isenabled()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
    gc.enable()


def test_nothing_is_collected_until_the_last_thread_has_left():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            inside.set()
            leave.wait(deadline(60))

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert inside.wait(deadline(60))
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


PARSERS = """
import ast, sys, threading
from pathlib import Path
from pedigree.data.artifacts import provenance
from pedigree.data.host.process import uncollected, without

class Finalized:
    def __init__(self):
        self.me = self
    def __del__(self):
        for _ in range(200):
            pass

def beside(parse):
    try:
        for _ in range(25):
            garbage = [Finalized() for _ in range(200)]
            parse()
    except SystemError as error:
        print(error)

def foreign():
    with uncollected():
        ast.parse(text)

text = Path(provenance.__file__).read_text()
sys.setswitchinterval(1e-5)
ours = lambda: provenance._parsed_text.__wrapped__(text)
threads = [threading.Thread(target=beside, args=[parse]) for parse in (ours, foreign, ours)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.integration
def test_threads_that_parse_at_the_same_time_do_not_disturb_each_other(root):
    """Where one of them collects garbage, some of these parsings end in a SystemError."""
    done = subprocess.run([sys.executable, "-c", PARSERS], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("pedigree.stages.__main__", "load_stage('decontaminate')"),
        pytest.param("pedigree.stages.sampling.vllm_engine", "_import_vllm()", marks=pytest.mark.nightly),
    ],
)
def test_a_job_begins_without_collections(root, module, call):
    """There are hundreds without it."""
    code = f"import gc, {module}; gone = []; gc.callbacks.append(lambda *of: gone.append(of)); {module}.{call}; print(len(gone))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 10


@pytest.mark.nightly
@pytest.mark.integration
def test_collections_of_an_engine_skip_what_it_imported_and_it_imports_no_audio(root):
    """vLLM collects explicitly while it starts: over a million imported objects, that took half of the time."""
    code = """
import gc, sys
from pedigree.data.host.process import without
from pedigree.stages.sampling.vllm_engine import UNUSED, _import_vllm
with without(*UNUSED):
    _import_vllm()
print(gc.get_freeze_count(), sys.modules.keys().isdisjoint(UNUSED))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    frozen, unused = done.stdout.split()[-2:]
    assert int(frozen) > 100_000 and unused == "True"


def test_what_an_import_is_to_do_without_is_missing_for_its_block_alone():
    sys.modules.pop("colorsys", None)
    with without("colorsys", "json"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        importlib.import_module("json")
    importlib.import_module("colorsys")


@pytest.mark.integration
def test_configs_are_imported_without_their_sources(root):
    """Pydantic would parse every class for the texts below its fields: a tenth of a second of every command and job."""
    code = "import ast; gone = []; ast.parse = gone.append; import pedigree.configs.language.kinds, pedigree.stages.job.job; print(gone)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.integration
def test_leaving_runs_exit_handlers_writes_what_was_printed_and_waits_for_no_thread(root):
    code = """
import atexit, ctypes, threading
from pedigree.data.host.process import leave
atexit.register(print, "handled")
threading.Thread(target=threading.Event().wait).start()
print("printed")
ctypes.CDLL(None).printf(b"by C\\n")
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=deadline(60))
    assert done.returncode == 75 and set(done.stdout.split("\n")) == {"printed", "handled", "by C", ""}
