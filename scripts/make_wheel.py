#!/usr/bin/env python3
"""Packs dist/pannier-*.whl: the Python package, libpannier.so, the pannier program and the libraries they need but torch's.

The wheel is `py3-none`: the binding is a torch class library, so one build serves every Python version.
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import re
import shutil
import subprocess
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
BUILD = ROOT / "build/dev"
# What every Linux has, or torch brings.
SYSTEM = re.compile(r"^(linux-vdso|ld-linux|lib(c|m|dl|rt|util|pthread|gcc_s|stdc\+\+|gomp)[.-]|libtorch|libc10|libcud|libnv|libnccl)")


def version() -> str:
    return re.search(r"project\(Pannier VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def needed_libraries(binary: pathlib.Path) -> list[pathlib.Path]:
    output = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    found = (re.match(r"\s*(\S+) => (/\S+)", line) for line in output.splitlines())
    return [pathlib.Path(m[2]) for m in found if m and not SYSTEM.match(m[1]) and "torch" not in m[2] and m[1] != "libpannier.so"]


def bundle(package: pathlib.Path) -> None:
    lib = package / "lib"
    lib.mkdir()
    shutil.copy(BUILD / "lib/libpannier.so", lib)
    if (BUILD / "lib/libpannier_cuda.so").exists():
        shutil.copy(BUILD / "lib/libpannier_cuda.so", lib)
    (package / "bin").mkdir()
    shutil.copy(BUILD / "bin/pannier", package / "bin/pannier")
    for needed in needed_libraries(lib / "libpannier.so"):
        shutil.copy(needed, lib / needed.name)
    for path in lib.iterdir():
        subprocess.run(["strip", "--strip-unneeded", path], check=True)
        subprocess.run(["patchelf", "--set-rpath", "$ORIGIN:$ORIGIN/../../torch/lib", path], check=True)
    subprocess.run(["strip", package / "bin/pannier"], check=True)
    subprocess.run(["patchelf", "--set-rpath", "$ORIGIN/../lib:$ORIGIN/../../torch/lib", package / "bin/pannier"], check=True)


def write_metadata(tree: pathlib.Path) -> None:
    info = tree / f"pannier-{version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: pannier\nVersion: {version()}\nSummary: Training beyond device memory\n"
        "License: Apache-2.0\nRequires-Python: >=3.10\nRequires-Dist: torch>=2.11\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: pannier\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n")
    (info / "entry_points.txt").write_text("[console_scripts]\npannier = pannier.program:main\n")
    shutil.copy(ROOT / "LICENSE", info / "LICENSE")
    rows = []
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(tree)},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")


def main() -> None:
    target = ROOT / "dist" / f"pannier-{version()}-py3-none-linux_x86_64.whl"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        shutil.copytree(ROOT / "python/pannier", tree / "pannier", ignore=shutil.ignore_patterns("__pycache__"))
        bundle(tree / "pannier")
        write_metadata(tree)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
            for path in sorted(p for p in tree.rglob("*") if p.is_file()):
                wheel.write(path, path.relative_to(tree))
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
