"""The one door to numba: functions compiled to machine code, kept for all clones and jobs of a machine.

numba itself keeps machine code beside the source, by its path and time; each job has a copy of our code of its own, and would compile
for seconds. Here it is kept by what the source says. numba adds its own version, the argument types and the processor.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.core.caching

from data.artifacts.assets import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])
_Locator: Any = numba.core.caching._CacheLocator
_settings: Any = numba.config


class ByContent(_Locator):
    """Where numba keeps the machine code of a source file (documented at `NUMBA_CACHE_LOCATOR_CLASSES`)."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line = function.__code__.co_firstlineno
        self._sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest()

    def get_cache_path(self) -> str:
        return str(cache_folder() / "kernels" / self._sha256[:16])

    def get_source_stamp(self) -> str:
        return self._sha256

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "ByContent":
        return cls(py_func, py_file)


def compiled(function: Function) -> Function:
    """A function of arrays and numbers as machine code. What it reads of its module's globals is fixed when it is compiled, so that
    they must be constants of its own file, made from nothing of another: what others say is an argument. Where nothing can be kept each
    process compiles for itself."""
    others, _settings.CACHE_LOCATOR_CLASSES = _settings.CACHE_LOCATOR_CLASSES, f"{__name__}.{ByContent.__name__}"
    try:
        made: Any = numba.njit(function, cache=_kept(function), nogil=True)
        return made
    finally:
        _settings.CACHE_LOCATOR_CLASSES = others


def _kept(function: Callable[..., Any]) -> bool:
    """Whether machine code can be kept: a cache that cannot be written is no reason to fail."""
    folder = Path(ByContent(function, function.__code__.co_filename).get_cache_path())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
