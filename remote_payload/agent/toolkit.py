"""CUDA sources need the compiler of torch's CUDA and only this GPU's code: minutes instead of an hour."""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import tarfile
import zipfile
from typing import NamedTuple

from agent import gpu
from agent.call import Refusal, Roots

ARCH = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
# setup.py files carry lists of architectures of their own, so the compiler itself takes them out: what is for
# this GPU stays (9.0 and 9.0a), and where nothing is, its own is put in.
_WRAPPER = """#!/bin/sh
kept=0
left=$#
while [ "$left" -gt 0 ]; do
    word=$1; shift; left=$((left - 1))
    case "$word" in
        -arch=*|--gpu-architecture=*) continue ;;
        -arch|--gpu-architecture) shift; left=$((left - 1)); continue ;;
        -gencode=*|--generate-code=*) value=${word#*=} ;;
        -gencode|--generate-code) value=$1; shift; left=$((left - 1)) ;;
        *) set -- "$@" "$word"; continue ;;
    esac
    case "$value" in
        %(patterns)s) set -- "$@" -gencode "$value"; kept=1 ;;
    esac
done
[ "$kept" = 1 ] || set -- "$@" %(own)s
exec %(nvcc)s "$@"
"""


class Toolkit(NamedTuple):
    """`home` is what CUDA_HOME wants; `release` such as `13.0`."""

    home: str
    nvcc: str
    release: str


def has_cuda_sources(sdist: str) -> bool:
    try:
        if sdist.endswith(".zip"):
            with zipfile.ZipFile(sdist) as archive:
                names = archive.namelist()
        else:
            with tarfile.open(sdist) as tar:
                names = tar.getnames()
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise Refusal("verify", f"{sdist} cannot be read: {error}", "send or download it again") from None
    return any(name.endswith(".cu") for name in names)


def architectures(roots: Roots, given: str | None) -> str:
    """`given`, or what the GPUs here are, as TORCH_CUDA_ARCH_LIST has it: `9.0`, or `8.0;9.0` when mixed."""
    if given is not None:
        found = sorted(set(given.replace(",", ";").split(";")))
    else:
        said = gpu.reply(gpu.ask(roots.run, gpu.DEADLINE_S, ARCH))
        found = sorted({line.strip() for line in said.text.splitlines() if line.strip()})
    if not found or not all(re.fullmatch(r"\d+\.\d[a-z]?", each) for each in found):
        why = f"not {given!r:.40}" if given is not None else "no GPU here says its own"
        raise Refusal("environment", f"CUDA sources need an architecture such as 9.0: {why}", "--arch 9.0")
    return ";".join(found)


def find(cuda: str, packages: str, work: str) -> Toolkit:
    """The nvcc of torch's CUDA (`13.0`), its own minor version first; refuses when only others are there.

    `packages` is the environment's site-packages: NVIDIA's wheels bring a compiler, too.
    """
    seen: list[Toolkit] = []
    for home in _homes(cuda):
        seen += _look(home)
    wheel = os.path.join(packages, "nvidia", f"cu{cuda.split('.')[0]}")
    if os.path.isfile(os.path.join(wheel, "bin", "nvcc")):
        seen += _look(_home_of_wheels(wheel, os.path.join(work, "cuda")))
    same = [each for each in seen if each.release == cuda]
    near = [each for each in seen if each.release.split(".")[0] == cuda.split(".")[0]]
    for each in same + near:
        return each
    others = ", ".join(sorted({f"{each.nvcc} is {each.release}" for each in seen}))
    major, minor = cuda.split(".")[:2]
    words = f"torch was built with CUDA {cuda}, and there is no nvcc {major}.x here"
    mend = f"apt-get install -y cuda-toolkit-{major}-{minor} (NVIDIA's repository), or pin {cuda}'s "
    mend += "nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt and nvidia-cuda-cccl in the lock"
    raise Refusal("environment", f"{words} ({others})" if others else words, mend)


def for_archs(found: Toolkit, archs: str, work: str) -> Toolkit:
    """The same toolkit in a folder of links, where `bin/nvcc` compiles for `archs` and nothing else.

    In CUDA_HOME and not in PYTORCH_NVCC, which torch heeds only where it builds with ninja.
    """
    numbers = [each.replace(".", "") for each in archs.split(";")]
    bare = sorted({re.sub(r"\D", "", number) for number in numbers})
    patterns = "|".join(f"*_{number}|*_{number},*|*_{number}a*" for number in bare)
    own = " ".join(f"-gencode arch=compute_{number},code=sm_{number}" for number in numbers)
    home = os.path.join(work, "cuda-home")
    binaries = os.path.join(home, "bin")
    os.makedirs(binaries)
    for source, target in ((found.home, home), (os.path.dirname(found.nvcc), binaries)):
        for name in os.listdir(source):
            if name not in ("bin", "nvcc"):
                os.symlink(os.path.join(source, name), os.path.join(target, name))
    path = os.path.join(binaries, "nvcc")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WRAPPER % {"patterns": patterns, "own": own, "nvcc": shlex.quote(found.nvcc)})
    os.chmod(path, 0o755)
    return found._replace(home=home, nvcc=path)


def _homes(cuda: str) -> list[str]:
    homes = [os.environ.get("CUDA_HOME", ""), f"/usr/local/cuda-{cuda}", "/usr/local/cuda", "/opt/cuda"]
    homes += sorted(glob.glob("/usr/local/cuda-*"), reverse=True)
    for folder in os.environ.get("PATH", "").split(":"):
        nvcc = os.path.realpath(os.path.join(folder, "nvcc"))
        if os.path.isfile(nvcc):
            homes.append(os.path.dirname(os.path.dirname(nvcc)))
    return list(dict.fromkeys(os.path.realpath(home) for home in homes if home))


def _look(home: str) -> list[Toolkit]:
    nvcc = os.path.join(home, "bin", "nvcc")
    try:
        said = subprocess.run([nvcc, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = _RELEASE.search(said.stdout.decode("utf-8", "replace"))
    return [Toolkit(home, nvcc, f"{found.group(1)}.{found.group(2)}")] if found else []


def _home_of_wheels(wheel: str, home: str) -> str:
    """NVIDIA's wheels have no `lib64` and only libraries with a number; the linker wants both without."""
    os.makedirs(os.path.join(home, "lib64"))
    for name in os.listdir(wheel):
        if name not in ("lib", "lib64"):
            os.symlink(os.path.join(wheel, name), os.path.join(home, name))
    for path in glob.glob(os.path.join(glob.escape(wheel), "lib", "lib*.so*")):
        for name in {os.path.basename(path), os.path.basename(path).partition(".so")[0] + ".so"}:
            link = os.path.join(home, "lib64", name)
            if not os.path.lexists(link):
                os.symlink(path, link)
    os.symlink("lib64", os.path.join(home, "lib"))
    return home
