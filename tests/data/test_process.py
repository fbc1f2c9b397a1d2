import gc
import subprocess
import sys

import pytest

from data.process import uncollected


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


@pytest.mark.parametrize(("module", "call"), [("stages.__main__", "load_stage('sft')"), ("stages.engines.sampler", "_import_vllm()")])
def test_a_job_begins_without_collections(root, module, call):
    """There are hundreds without it."""
    code = f"import gc, {module}; gone = []; gc.callbacks.append(lambda *of: gone.append(of)); {module}.{call}; print(len(gone))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 10


def test_leaving_runs_exit_handlers_writes_what_was_printed_and_waits_for_no_thread(root):
    code = """
import atexit, ctypes, threading, time
from data.process import leave
atexit.register(print, "handled")
threading.Thread(target=time.sleep, args=(600,)).start()
print("printed")
ctypes.CDLL(None).printf(b"by C\\n")
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 75 and set(done.stdout.split("\n")) == {"printed", "handled", "by C", ""}
