"""The ranks of a job on several nodes: on each node, one of these processes starts torchrun, in the environment of the job
(`pipelines.jobs.job_environment`), with a scratch folder that all nodes share under one path:

    python -m pedigree.stages.training.nodes SCRATCH lead [HOST]    on the node of rank 0, by default under its `hostname`
    python -m pedigree.stages.training.nodes SCRATCH join           on each of the others, at any time

The lead hosts a store at a free port, writes its address to `meeting.json` and waits for the others. Nodes are numbered in the order of
their arrival.

A collective waits for a dead node for days. Each node therefore counts up its beats in the store, and ends with all its ranks when another
one has been silent for `SILENCE_S`. Exit codes: those of torchrun, and 3 if the job has all its nodes.
"""

import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.host.process import leave
from pedigree.data.store.fence import FENCE
from pedigree.data.store.heartbeat import BEAT_S, Listener
from pedigree.stages.job.job import Job
from pedigree.stages.job.meeting import MEETING, Meeting, end_meeting
from pedigree.stages.job.spec import JobSpec
from pedigree.stages.training import ranks

SILENCE_S = 15.0
"""Longer than any pause of a machine that works; a store is no network file system, whose caches `heartbeat.SILENCE_S` outlasts."""
LEAVING_S = 5.0
"""The store may end this long before the other nodes leave a successful job."""
FULL = 3
_ARRIVED = "arrived"


def main(scratch: Path, role: str, host: str = "") -> int:
    spec = JobSpec.model_validate(json.loads((scratch / "spec.json").read_text()))
    if role == "lead":
        store = TCPStore(host or socket.gethostname(), 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    else:
        while (meeting := Meeting.read(scratch)) is None or meeting.fence != os.environ.get(FENCE):  # of another submission
            time.sleep(1)
        store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=SILENCE_S))
    node, nodes = store.add(_ARRIVED, 1) - 1, spec.numerics.nodes
    if node >= nodes:
        return FULL
    if role == "lead":
        _gather(scratch, spec, store)
    while store.add(_ARRIVED, 0) < nodes:  # heartbeats start when all nodes are there
        time.sleep(1)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(store.host, store.port, node, nodes, ended), daemon=True, name="nodes").start()
    try:
        code = ranks.start(
            f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={spec.numerics.ranks_per_node}", "--rdzv-backend=static",
            f"--rdzv-endpoint={store.host}:{store.port}", f"--shutdown-timeout={spec.placement.grace_s}",
            "-m", "pedigree.stages", str(scratch),
        )  # fmt: skip
        store.set(f"left {node}", "")  # rank 0 may still check and hash the result for a long time
        return code
    finally:
        ended.set()
        if role == "lead":
            end_meeting(scratch, os.environ.get(FENCE))


def _gather(scratch: Path, spec: JobSpec, store: TCPStore) -> None:
    """Wait for the other nodes, with the heartbeats of a running job."""
    job, nodes = Job.of(spec, scratch), spec.numerics.nodes
    write_json(scratch / MEETING, Meeting(host=store.host, port=store.port, fence=str(job.fence.path) if job.fence else None).model_dump())
    with job.beating():
        while (here := store.add(_ARRIVED, 0)) < nodes:
            job.doing("waiting for `pedigree join` on other nodes", here, nodes, "nodes")
            time.sleep(1)


def _watch(host: str, port: int, node: int, nodes: int, ended: threading.Event) -> None:
    """Beat, and end this process when another node is gone; the kernel then ends its ranks (`die_with`)."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SILENCE_S))
    listeners = {other: Listener() for other in range(nodes) if other != node}

    def look() -> list[int]:
        store.add(f"beat {node}", 1)
        silent = (other for other, listener in listeners.items() if listener.silent_s(store.add(f"beat {other}", 0)) > SILENCE_S)
        return [other for other in silent if not store.check([f"left {other}"])]

    with ThreadPoolExecutor(1) as thread:  # the machine of the store may be gone, too, and the connection open
        while not ended.wait(BEAT_S):
            try:
                gone = thread.submit(look).result(SILENCE_S)
            except Exception as error:  # the boundary to the store: any failure means that it cannot be reached
                gone = [] if ended.wait(LEAVING_S) else [0]
                print(f"the store of the first node does not answer: {error!r}", file=sys.stderr)
            if gone:
                silent = f"node {', '.join(map(str, gone))} has been silent for {SILENCE_S:g} s"
                print(f"{silent}: node {node} ends with its ranks", file=sys.stderr, flush=True)
                os._exit(1)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
