"""Waiting at pipes."""

import select


def readable(pipe: int, seconds: float) -> bool:
    """Whether there is something to read at a pipe, its end included, within so many seconds.

    By `poll`: `select` refuses descriptors above 1,023, and a process that maps many shards has them.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
