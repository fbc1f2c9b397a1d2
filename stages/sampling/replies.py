"""Log of an endpoint's replies, in `replies.jsonl` of the job's scratch folder."""

from dataclasses import asdict

from pedigree.stages.job.job import Job
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.response_log import ResponseLog


def reply_log(job: Job) -> ResponseLog[Reply]:
    """This job's replies, by the hash of the request."""
    return ResponseLog(job, job.folder / "replies.jsonl", "reply", asdict, lambda written: Reply(**written))
