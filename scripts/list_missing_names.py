#!/usr/bin/env python3
"""Lists the names under `deepspeed.` that Python sources use and Pannier lacks: ./dev run python scripts/list_missing_names.py FOLDER...

Point it at the installed packages of a new release (transformers, accelerate, peft, trl). Each line is a name and the
first place that uses it; the exit code is 1 where there are any. Names of features that Pannier does not have are known
to be absent, and are listed apart.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from collections.abc import Iterator

import pannier.deepspeed


def used_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names under `deepspeed`, and the lines that they are on."""
    aliases = {"deepspeed": "deepspeed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "deepspeed":
                    aliases[name.asname or "deepspeed"] = name.name if name.asname else "deepspeed"
                    yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "deepspeed":
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                yield f"{node.module}.{name.name}", node.lineno
    imports = any(isinstance(node, (ast.Import, ast.ImportFrom)) and "deepspeed" in ast.unparse(node) for node in ast.walk(tree))
    for node in ast.walk(tree) if imports else ():
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join([aliases[node.id], *reversed(parts)]), node.lineno


def is_there(name: str) -> bool:
    """Whether the name is a module of the stand-in's, or an attribute of one. What follows a class is not looked at."""
    module, rest = importlib.import_module("deepspeed"), name.split(".")[1:]
    owner: object = module
    path = "deepspeed"
    for part in rest:
        path += f".{part}"
        if not hasattr(owner, part):
            try:
                owner = importlib.import_module(path)
                continue
            except ImportError:
                return False
        owner = getattr(owner, part)
        if isinstance(owner, type) or callable(owner):
            return True
    return True


def main(folders: list[str]) -> int:
    """Lists them."""
    pannier.deepspeed.install()
    explained = importlib.import_module("deepspeed.missing").is_explained
    first_use: dict[str, str] = {}
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "deepspeed" not in text:
                continue
            try:
                tree = ast.parse(text)
            except SyntaxError:
                continue
            for name, line in used_names(tree):
                first_use.setdefault(name, f"{path}:{line}")
    lacking = {name: place for name, place in sorted(first_use.items()) if not is_there(name)}
    unknown = {name: place for name, place in lacking.items() if not explained(name)}
    print(f"{len(first_use)} names used, {len(lacking)} not there, {len(unknown)} of them unknown")
    for name, place in lacking.items():
        print(f"  {'UNKNOWN' if name in unknown else 'absent ':8} {name}  {place}")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
