"""Where the nodes of a job meet."""

from pathlib import Path

import pytest

from pedigree.data.artifacts.artifacts import write_json
from pedigree.stages.job.meeting import MEETING, Meeting, end_meeting

pytestmark = pytest.mark.unit


def test_a_first_node_that_comes_back_late_leaves_the_meeting_of_the_next_attempt(tmp_path: Path) -> None:
    later = Meeting(host="n2", port=29500, fence="/leases/x/2")
    write_json(tmp_path / MEETING, later.model_dump())
    end_meeting(tmp_path, "/leases/x/1")
    assert Meeting.read(tmp_path) == later
    end_meeting(tmp_path, "/leases/x/2")
    assert Meeting.read(tmp_path) is None
