"""Why a stage fails, as an exception and as one word."""

import errno
import re
import shutil
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError

FULL_BELOW_BYTES = 4 << 20


class StageError(PedigreeError):
    """A stage cannot deliver its output; a retry would fail the same way."""


BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that indicate a bug. Code that passes user input to a library which may raise one converts it to a `PedigreeError`."""


MACHINE = "use an execution profile for this machine (`pedigree doctor` shows what it has), or install a torch built for its processors"
WEIGHTS = "the model's weights are damaged or do not have the shapes that its config.json states: copy both from the model's origin"
SHAPE = "vLLM or its attention kernels support no heads of this size: use a model with another head size, or another backend"
KERNEL = "no kernel of this torch and vLLM serves this model: use another model, or another dtype, attention or device in the profile"
LASTING = {
    r"no kernel image is available|found no nvidia driver|no cuda gpus are available|driver on your system is too old": MACHINE,
    r"driver version is insufficient|invalid device ordinal|not compiled with cuda|unsupported toolchain|killed by sigill": MACHINE,
    r"failed to infer device type": MACHINE,
    r"size mismatch for": WEIGHTS,
    r"head[ _]?(?:dim|size)": SHAPE,
    r"(?s)\A(?!.*(?:nccl|gloo|\[errno)).*(?:unsupported|not support|only support|not implemented for|out of resource)": KERNEL,
}
"""Patterns of errors of torch, vLLM and their kernels that occur again at every attempt → remedy."""


def lasting(error: BaseException) -> str | None:
    """The remedy for an error of a library that another attempt would not avoid; None where it might."""
    text = str(error).lower() if isinstance(error, RuntimeError | AssertionError | EngineLost) else ""
    return next((remedy for pattern, remedy in LASTING.items() if re.search(pattern, text)), None)


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or a GPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def is_collective(error: BaseException) -> bool:
    """Whether an exchange between ranks failed, which only means that another rank has."""
    text = str(error).lower()
    return "gloo" in text or "nccl" in text or type(error).__name__.startswith("Dist")


class NotFinite(StageError):
    """The loss is NaN or infinite; the same data and weights would give it again."""


class EngineLost(Exception):
    """The engine died or stopped responding; another attempt may succeed."""


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder is practically full."""
    return shutil.disk_usage(folder).free < FULL_BELOW_BYTES


def storage_cause(error: OSError) -> str:
    """Classify a disk error as one word."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "not_writable" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "storage"


class Preempted(BaseException):
    """The job received a stop signal and can be resumed. A BaseException, so that no library's `except Exception` swallows it."""
