"""Replies of an endpoint, each kept as it arrives, in `replies.jsonl` of the job's scratch folder."""

from dataclasses import asdict

from stages.job.job import Job
from stages.sampling.endpoint import Reply
from stages.sampling.response_log import KeptLog


def kept_replies(job: Job) -> KeptLog[Reply]:
    """All replies that this job has, by the hash of what was asked."""
    return KeptLog(job, job.folder / "replies.jsonl", "reply", asdict, lambda told: Reply(**told))
