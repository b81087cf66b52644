"""The C kernels; everything else is in pyproject.toml."""

import platform
from glob import glob

from setuptools import Extension, setup

SOURCES = ["generic", "avx2", "avx512", "amx", "dispatch", "largest", "philox", "verdict"]
# Apple's compiler has no OpenMP of its own; there the kernels run in one thread.
OPENMP = [] if platform.system() == "Darwin" else ["-fopenmp"]

setup(
    ext_modules=[
        Extension(
            "mtplx.kernels._decoder",
            [f"mtplx/kernels/{name}.c" for name in SOURCES],
            depends=sorted(glob("mtplx/kernels/*.h")),
            # No product and sum in one: where compilers fuse them differs with the number of rows,
            # and a row has to have the same bits in any company.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-Wno-psabi", *OPENMP],
            extra_link_args=OPENMP,
            # Without a compiler the package installs all the same, and runs in torch.
            optional=True,
        )
    ]
)
