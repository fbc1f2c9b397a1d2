"""The trained weights reach the engines."""

import shutil
from collections.abc import Collection

from pedigree.configs.methods.training import Rlvr
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.rlvr.handover import release
from pedigree.stages.sampling.engines import Fleet
from pedigree.stages.sampling.sampler import write_version
from pedigree.stages.training.trainer import Trainer


def load_weights(engines: Fleet | None, trainer: Trainer, version: int, config: Rlvr, chat: Chat, job: Job) -> None:
    """Transfer the trained weights, or only the adapters, to the engines through a folder; called on all ranks. Their version is the
    number of updates that made them."""
    folder = job.folder / "weights"
    if engines:
        shutil.rmtree(folder, ignore_errors=True)
    if config.lora is not None:
        trainer.export_adapters(folder, config.lora)
    else:
        trainer.export(folder, chat)
    release(trainer)
    if engines:
        write_version(folder, version)
        (engines.load if config.lora is None else engines.load_adapters)(folder)


def refuse_stale(versions: Collection[int], updates: int, step: int) -> None:
    """Check that all answers were sampled with the trainer's weights. One update may move log-probs by less than rounding does, so their
    gap alone cannot tell.

    Raises:
        StageError: they were not.
    """
    if stale := sorted(set(versions) - {updates}):
        raise StageError(
            f"answers of step {step + 1} were sampled with weights after {stale[0]} updates, but the trainer has made {updates}: the "
            "sampler did not load the trainer's weights. Run the stage again, and report the error if it returns"
        )
