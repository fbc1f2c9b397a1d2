import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import deadline

from pedigree.data.host.parallel import AHEAD, mapped

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_batches_and_see_what_is_here(workers):
    here = list(range(100))
    assert list(mapped(lambda batch: (batch, here[batch]), range(100), workers)) == [(number, number) for number in range(100)]


def test_as_many_processes_work_as_are_asked_for_and_none_stays():
    pids = set(mapped(lambda _: os.getpid(), range(200), 3))
    assert 1 <= len(pids) <= 3 and os.getpid() not in pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert set(mapped(lambda _: os.getpid(), range(9), 1)) == {os.getpid()}


def test_no_more_batches_are_asked_for_than_are_under_way():
    asked = []
    results = mapped(lambda batch: batch, (asked.append(number) or number for number in range(100)), 2)
    next(results)
    assert len(asked) == AHEAD * 2
    results.close()


def test_what_goes_wrong_in_a_worker_goes_wrong_here():
    with pytest.raises(ZeroDivisionError):
        list(mapped(lambda batch: 1 // batch, [1, 0, 1], 2))


def test_workers_end_with_a_parent_that_is_killed():
    program = """
import os, signal
from pedigree.data.host.parallel import mapped

def work(batch):
    os.write(1, f"{os.getpid()}\\n".encode())  # whole, beside the other's
    signal.pause()

list(mapped(work, range(2), 2))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(signal.SIGKILL)
        parent.communicate(timeout=deadline(60))  # ends when nobody has its output open any more, the workers among them
    assert len(set(pids)) == 2
