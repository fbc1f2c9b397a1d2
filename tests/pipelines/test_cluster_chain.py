"""`tiny` in a cluster whose jobs, nodes, scheduler and user's commands die."""

from pathlib import Path

import pytest
from chaos import chaos, disturbances
from chaos_clusters import CLUSTERS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", CLUSTERS)
def test_tiny_has_the_bytes_of_local_jobs_whatever_is_killed(tmp_path: Path, name: str) -> None:
    cluster = CLUSTERS[name](tmp_path)
    try:
        tally = chaos(tmp_path, disturbances(20, None, cluster.harms), 1, None, None, print, cluster)
    finally:
        cluster.stop()
    print("\n".join(tally.lines()))
    assert not tally.different
