"""Pipes are waited at whatever their number, and their end is something to read."""

import fcntl
import os
import resource

import pytest

from pedigree.data.host.pipes import readable


@pytest.fixture
def many_files():
    """As many open files as a process that maps a thousand shards may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard <= 2000:
        pytest.skip("more open files are not allowed here: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pipe_may_have_a_number_above_those_that_select_knows(many_files):
    low, end = os.pipe()
    pipe = fcntl.fcntl(low, fcntl.F_DUPFD, 2000)
    os.close(low)
    assert pipe >= 2000 and not readable(pipe, 0)
    os.write(end, b"x")
    assert readable(pipe, 0) and os.read(pipe, 8) == b"x" and not readable(pipe, 0.01)
    os.close(end)
    assert readable(pipe, 0) and os.read(pipe, 8) == b""
    os.close(pipe)
