"""numba compilation with a machine-wide cache; the only user of numba.

numba caches machine code by the path and time of the source. Every job has its own copy of the code, and would compile for seconds, so
this cache uses the source's content instead. numba adds its version, the argument types and the processor to the key.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.core.caching

from pedigree.data.artifacts.assets import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])
_Locator: Any = numba.core.caching._CacheLocator
_settings: Any = numba.config


class ByContent(_Locator):
    """Cache locator by content of the source file (see numba's `NUMBA_CACHE_LOCATOR_CLASSES`)."""

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
    """Compile a function of arrays and numbers.

    Module globals are frozen at compile time, so they must be constants that depend on this file alone; pass everything else as arguments.
    If the cache is not writable, each process compiles again.
    """
    others, _settings.CACHE_LOCATOR_CLASSES = _settings.CACHE_LOCATOR_CLASSES, f"{__name__}.{ByContent.__name__}"
    try:
        made: Any = numba.njit(function, cache=_kept(function), nogil=True)
        return made
    finally:
        _settings.CACHE_LOCATOR_CLASSES = others


def _kept(function: Callable[..., Any]) -> bool:
    """Whether the cache is writable; if not, compilation must still work."""
    folder = Path(ByContent(function, function.__code__.co_filename).get_cache_path())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
