"""Which policies of a pool answer a prompt.

Everything is decided by hashes of (seed, prompt id, label): neither the order of prompts or policies nor other prompts change a draw, and
one more policy in the pool changes only the draws that it enters (rendezvous hashing, Thaler & Ravishankar 1998).
"""

from collections.abc import Collection, Sequence

from configs.base.frozen import digest


def draw_policies(
    labels: Sequence[str],
    prompt_id: str,
    *,
    seed: int,
    count: int | None,
    on_policy: Collection[str] = (),
    share: float | None = None,
) -> list[str]:
    """The policies that answer one prompt, in the order of `labels`.

    Args:
        labels: the pool.
        prompt_id: of the prompt.
        seed: of the stage.
        count: how many of the pool answer; None: all.
        on_policy: labels of the policy that is to be trained.
        share: probability that one of `on_policy` answers, beside `count` - 1 others; otherwise `count` others do. None: they are drawn
            like all others.
    """
    if count is None:
        return list(labels)
    if share is None:
        chosen = _first(count, labels, prompt_id, seed)
    else:
        own = [label for label in labels if label in on_policy]
        others = [label for label in labels if label not in on_policy]
        taken = int(uniform(seed, "on_policy", prompt_id) < share)
        chosen = _first(taken, own, prompt_id, seed) | _first(count - taken, others, prompt_id, seed)
    return [label for label in labels if label in chosen]


def uniform(*parts: str | int) -> float:
    """A number in [0, 1) that depends on the parts only."""
    return int(digest(list(parts))[:12], 16) / 16**12


def _first(count: int, labels: Sequence[str], prompt_id: str, seed: int) -> set[str]:
    """So many of the labels: a uniform draw without replacement, since their hashes are independent."""
    return set(sorted(labels, key=lambda label: digest([seed, "policy", prompt_id, label]))[:count])
