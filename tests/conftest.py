"""What all tests share: no telemetry, no hub, slow tests last, GPU tests only where there is a GPU."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.launcher import PROCESS_GROUP

os.environ |= {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
ROOT = Path(__file__).resolve().parents[1]
# A shell starts what runs in its background with Ctrl-C ignored, and all our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Trainers in this process put into the environment what torchrun would: jobs of later tests would take themselves for ranks."""
    yield
    for name in PROCESS_GROUP:
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
