#!/usr/bin/env bash
# Installs the build, configures the outside project against it alone, and runs it.
set -euo pipefail
source_dir=$1 build_dir=$2 torch_root=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build_dir" --prefix "$work/install" >/dev/null
cmake -S "$source_dir/tests/outside" -B "$work/build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_PREFIX_PATH="$work/install" \
  -DPANNIER_TORCH_ROOT="$torch_root" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake --build "$work/build" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/build/outside"
