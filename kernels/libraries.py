"""The CUDA libraries that are mapped into this process, and whether two versions of one are mixed.

cuDNN consists of a small entry library and several sub-libraries (graph, ops, engines). A process that loads
torch's entry library and another installation's sub-libraries computes wrong attention under CUDA graphs.
"""

import re
from collections import defaultdict
from pathlib import Path

import torch

# libcudnn_ops.so.9.14.0: library and part. libcublasmp.so.0 and plugins of NCCL are separate libraries
_FILE = re.compile(r"lib(cudnn|cublas|nccl)((?<=cudnn)_\w+|(?<=cublas)Lt|)\.so[.\d]*$")


def mapped(maps: str | None = None) -> dict[str, list[Path]]:
    """The files of cuDNN, cuBLAS and NCCL in this process, or in the text of a /proc/PID/maps. Empty if there
    is no such file."""
    if maps is None:
        source = Path("/proc/self/maps")
        maps = source.read_text() if source.exists() else ""
    found = defaultdict(set)
    for line in maps.splitlines():
        text = line.removesuffix(" (deleted)")
        # most of thousands of lines are other files
        if _FILE.search(text):
            path = Path(text.split(maxsplit=5)[-1])
            if match := _FILE.match(path.name):
                found[match[1]].add(path)
    return {name: sorted(paths) for name, paths in found.items()}


def version_of(path: Path) -> str:
    """The version of a library: from the file to which `path` links, else from the package that installed it,
    else its folder."""
    suffix = path.resolve().name.partition(".so.")[2]
    if suffix.count("."):
        return suffix
    library = _FILE.match(path.name)[1]
    for packages in path.parents[:4]:
        for package in packages.glob(f"nvidia_{library}*.dist-info"):
            return package.name.removesuffix(".dist-info").rpartition("-")[2]
    return str(path.parent)


def conflicts(files: dict[str, list[Path]] | None = None) -> list[str]:
    """A sentence with a fix for each library that this process uses in two versions."""
    files = mapped() if files is None else files
    packages = Path(torch.__file__).parents[1]
    sentences = []
    for library, paths in files.items():
        entries = [p for p in paths if _FILE.match(p.name)[2] == ""]
        used = {p.parent for p in paths if p not in entries} if library == "cudnn" else set()
        # only torch's own entry library counts; other packages may have mapped another one
        of_torch = {p.parent for p in entries if packages in p.parents}
        if library == "cudnn":
            mixed = len(used | of_torch) > 1
        else:
            # copies of one version are harmless
            mixed = len({version_of(p) for p in paths}) > 1
        if mixed:
            versions = sorted({f"{version_of(p)} ({p.parent})" for p in paths})
            home = next(iter(of_torch), paths[0].parent)
            sentences.append(
                f"two versions of {library} are mixed in this process: {', '.join(versions)}. Start it with "
                f"LD_LIBRARY_PATH={home}:$LD_LIBRARY_PATH"
            )
    return sentences
