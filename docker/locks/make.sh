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
# The ascend image brings vLLM and all it needs; only these are ours to add, at the versions of the other images.
grep -E '^(blake3|cffi|cryptography|markdown-it-py|mdurl|platformdirs|pycparser|pydantic-settings|pygments|python-dotenv|rich)==' \
  docker/locks/cpu.lock > docker/locks/ascend.lock
