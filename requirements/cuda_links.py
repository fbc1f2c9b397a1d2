"""Lets compilers link with the CUDA of the GPU lock: NVIDIA's wheels lack the names that a linker looks for.

flashinfer, which compiles at run time, links with `-L$CUDA_HOME/lib64 -L$CUDA_HOME/lib64/stubs -lcudart -lcuda`, as torch does for
extensions. The wheels have `lib`, `libcudart.so.13` and no `libcuda.so`, which is the driver's. Run it with the Python of the environment,
after an installation; where that has no CUDA it does nothing.
"""

import re
import sysconfig
from pathlib import Path

DRIVER = "INPUT(-l:libcuda.so.1)\n"
"""A linker's script: the library of the driver, which may be there under this name alone."""


def main(packages: Path) -> None:
    for lib in packages.glob("nvidia/cu[0-9]*/lib"):
        _link(lib.with_name("lib64"), lib.name)
        for library in lib.glob("*.so.*"):
            _link(lib / re.sub(r"\.so\..*", ".so", library.name), library.name)
        (lib / "stubs").mkdir(exist_ok=True)
        (lib / "stubs" / "libcuda.so").write_text(DRIVER)


def _link(name: Path, target: str) -> None:
    """Unless NVIDIA's wheel has a file of this name; a link of another version is replaced."""
    if name.is_symlink():
        name.unlink()
    if not name.exists():
        name.symlink_to(target)


if __name__ == "__main__":
    main(Path(sysconfig.get_path("purelib")))
