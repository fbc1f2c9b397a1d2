"""Logs of jobs, running or finished: found by the name of a stage, followed as they grow, without the chatter of libraries."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from pedigree.configs.base.mistakes import nearest
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.pipelines.jobs.live import Signs, live_jobs
from pedigree.pipelines.jobs.scratch_state import UNKNOWN, address_of
from pedigree.pipelines.run.publication import log_file, node_logs

FOLLOW_POLL_S = 0.5


def find_log(project: Project, name: str) -> tuple[str, Path]:
    """Return (address, log file) of a stage, by name or address: the log of its unfinished job, else of its last finished one.

    Raises:
        UsageProblem: none or several match.
    """
    found: dict[str, Path] = {}
    finished = project.private / "logs"
    for path in sorted(finished.glob("*/*.log")):
        found[path.relative_to(finished).with_suffix("").as_posix()] = path
    for path in sorted((project.private / "scratch").glob("*/log.txt"), key=lambda path: path.stat().st_mtime):
        found[address_of(path.parent)] = path
    found.pop(UNKNOWN, None)
    chosen = [address for address in found if address == name or address.partition("/")[2] == name]
    if len(chosen) == 1:
        return chosen[0], found[chosen[0]]
    if chosen:
        raise UsageProblem(f"{name!r} is ambiguous: specify one of {', '.join(chosen)}")
    raise UsageProblem(
        f"no log of {name!r}: it has not run here. Available logs: {', '.join(sorted(found)) or 'none'}{nearest(name, [*found])}"
    )


def queued(project: Project, address: str) -> str:
    """What the stage's job waits for in a scheduler's queue; empty if it does not."""
    return "".join(job.waiting for job in live_jobs(project) if job.address == address)


def follow(project: Project, address: str, log: Path) -> Iterator[str]:
    """Yield what a log and those of the job's further nodes gain, until the stage's job ends."""
    offsets, signs = dict[str, int](), Signs(project)
    while True:
        alive = any(job.address == address for job in live_jobs(project, signs))
        text = gained(log, offsets, alive)
        if not text and not log.exists():  # the stage ended and its log was moved
            log = log_file(project, address)
            text = gained(log, offsets, alive)
        if text:
            yield text
        if not alive:
            return
        time.sleep(FOLLOW_POLL_S)


def gained(log: Path, offsets: dict[str, int], grows: bool = False) -> str:
    """What the logs of a job have gained since `offsets` (host → bytes), which are updated: lines of further nodes, which begin with the
    node's name, then those of its own log. Of several logs that grow, whole lines."""
    nodes, found = node_logs(log), ""
    for host, path in nodes.items():
        lines = _text_from(path, host, offsets, grows).removesuffix("\n").split("\n")
        found += "".join(f"({host}) {line}\n" for line in lines if line)
    return found + _text_from(log, "", offsets, grows and bool(nodes))


CHATTER = re.compile(
    r"(?:\([\w.-]+(?: pid=\d+)?\) )*"
    r"(?:\[[-\d :,.]+\] \[(?:INFO|DEBUG)\]|(?:INFO|DEBUG)[ :]|\S*site-packages/\S+: \w*Warning: |\s+warnings\.warn\(|.*\d+%\|"
    r"|DeepSpeed \S+ built |(?:begin|end) bf16_ ?optimizer$|(?:before|after) (?:initializing group|GatheredParameters)|MA [\d.]+ GB "
    r"|CPU Virtual Memory: |_load_legacy_checkpoint |Triton is installed, but )"
)
"""Lines of libraries: messages below warnings, Python's warnings about code that is not the user's, progress bars, memory."""


def without_chatter(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a growing log without those of libraries; of a line that was overwritten, the last state."""
    rest = ""
    for text in texts:
        *lines, rest = f"{rest}{text}".split("\n")
        yield from (f"{line}\n" for line in lines if not CHATTER.match(line.rstrip("\r").rpartition("\r")[2]))
    if rest and not CHATTER.match(rest.rpartition("\r")[2]):
        yield rest


def last_lines(texts: Iterator[str], lines: int, shown: Callable[[Iterable[str]], Iterator[str]]) -> Iterator[str]:
    """The last lines of a log, whose text until now comes first, and what it grows by. `shown` filters texts by line."""
    *whole, rest = next(texts, "").split("\n")
    kept = list(shown(f"{line}\n" for line in whole))
    yield from kept[max(0, len(kept) - lines + bool(rest)) :]
    yield from shown(chain([rest], texts))


def _text_from(path: Path, host: str, offsets: dict[str, int], whole_lines: bool) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(offsets.get(host, 0))
            data = stream.read()
    except OSError:
        return ""
    data = data[: data.rfind(b"\n") + 1] if whole_lines else data
    offsets[host] = offsets.get(host, 0) + len(data)
    return data.decode(errors="replace")
