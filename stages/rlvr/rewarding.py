"""The reward of an answer, given its verifier's score."""

from pedigree.configs.methods.training import Reward


def reward(score: float, finish_reason: str, given: Reward) -> float:
    """See `configs.methods.training.Reward`."""
    return given.truncated if given.truncated is not None and finish_reason == "length" else given.right * score
