#!/usr/bin/env bash
# Make the locks anew. No address of an index gets into them, so they hold on any mirror.
set -euo pipefail
cd "$(dirname "$0")/../.."
lock() { uv pip compile -q --no-emit-index-url --no-header --no-annotate --universal --python-version 3.11 \
  --overrides docker/locks/overrides.txt "$@"; }
lock --extra cpu pyproject.toml -o docker/locks/cpu.lock
lock --extra cpu --extra dev -c docker/locks/cpu.lock pyproject.toml -o docker/locks/dev.lock
lock --extra cuda pyproject.toml -o docker/locks/cuda.lock
sed -i "/sys_platform == 'never'/d; / ; python_full_version >= '3.13'/d" docker/locks/*.lock
