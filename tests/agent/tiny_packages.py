"""Real wheels and sdists of a few hundred bytes, made without a network and without a build tool."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile

PY = f"cp3{sys.version_info[1]}"

# A build backend inside the sdist (PEP 517): what setuptools would do, without setuptools.
_BACKEND = """
import os, subprocess, sys, sysconfig, time, zipfile

NAME, VERSION, SOURCE = {name!r}, {version!r}, {source!r}


def build_wheel(folder, config_settings=None, metadata_directory=None):
    wait = os.environ.get("TINY_WAIT_FOR") or {wait!r}
    while wait and not os.path.exists(wait):
        print("compiling", flush=True)
        time.sleep(0.1)
    library = NAME + sysconfig.get_config_var("EXT_SUFFIX")
    if SOURCE.endswith(".cu"):
        compiler = os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc")
        for arch in os.environ["TORCH_CUDA_ARCH_LIST"].split(";"):
            print("for", arch)
        foreign = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"]
        argv = [compiler, "-c", SOURCE, "-o", library, *foreign]
    else:
        include = sysconfig.get_path("include", vars=dict(installed_base=sys.base_prefix))
        argv = ["cc", "-shared", "-fPIC", "-O1", "-I" + include, SOURCE, "-o", library]
    print(argv)
    subprocess.run(argv, check=True)
    wheel = NAME + "-" + VERSION + "-{py}-{py}-linux_" + os.uname().machine + ".whl"
    with zipfile.ZipFile(os.path.join(folder, wheel), "w") as archive:
        archive.write(library)
        for file, text in {metadata!r}.items():
            archive.writestr(file, text)
    return wheel
"""
C_SOURCE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *ignored) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", "", -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""
CU_SOURCE = "__global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }\n"


def wheel(
    name: str, version: str, files: dict[str, str] | None = None, requires: str = ""
) -> tuple[str, bytes]:
    """A pure wheel: (file name, content). Without `files` it is a module that knows its version."""
    files = files or {f"{name}.py": f"VERSION = {version!r}\n"}
    content = {**files, **_metadata(name, version, "py3-none-any", requires)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def sdist(name: str, version: str, source: str, text: str, wait: str = "") -> tuple[str, bytes]:
    """A source package that compiles `source` (.c or .cu); with `wait` only once that file is there."""
    metadata = _metadata(name, version, f"{PY}-{PY}-linux_x86_64")
    backend = _BACKEND.format(name=name, version=version, source=source, wait=wait, py=PY, metadata=metadata)
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": backend,
        source: text.replace("NAME", name),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(content.encode())
            tar.addfile(member, io.BytesIO(content.encode()))
    return f"{name}-{version}.tar.gz", buffer.getvalue()


def _metadata(name: str, version: str, tag: str, requires: str = "") -> dict[str, str]:
    folder = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{folder}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{folder}/RECORD": "",
    }
