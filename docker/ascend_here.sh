#!/usr/bin/env bash
# The ascend target as far as it goes without its base image: built on a stand-in (Debian with Python, CANN's files in
# name only, and an installer that installs a stub), then started without a card. After docker/build_here.sh, as root.
# What this shows: stages parse, every path that is copied exists, the locked packages install, the build fails without
# the operator library, the entry point refuses. What it doesn't: anything of CANN, torch-npu or vllm-ascend.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/samebits-image}")
log=$work/ascend.log
mkdir -p "$work"
say() { echo "ok    $1"; }
fail() { echo "FAIL  $1"; tail -20 "$log"; exit 1; }

standin() { # name, what its installer does
  buildah bud -q --isolation chroot --format docker --layers -t "localhost/$1" -f - "$work/empty" >> "$log" 2>&1 <<END
FROM localhost/samebits-base
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip && rm -rf /var/lib/apt/lists/*
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN mkdir -p /usr/local/Ascend/ascend-toolkit /usr/local/Ascend/nnal/atb /vllm-workspace/vllm-ascend/csrc \
 && echo 'export ASCEND_TOOLKIT_HOME=/usr/local/Ascend/ascend-toolkit/latest' > /usr/local/Ascend/ascend-toolkit/set_env.sh \
 && echo ':' > /usr/local/Ascend/nnal/atb/set_env.sh \
 && echo '$2' > /vllm-workspace/vllm-ascend/csrc/build_batch_invariant_ops.sh
END
}
build() { # name of the base, tag
  buildah bud -q --isolation chroot --format docker --layers --force-rm --target ascend -t "localhost/$2" \
    --build-arg CPU_BASE=localhost/samebits-base --build-arg "ASCEND_BASE=localhost/$1" . >> "$log" 2>&1
}
mkdir -p "$work/empty"
: > "$log"
echo "== ascend target on a stand-in base"
standin samebits-ascend-base 'mkdir -p /usr/lib/python3/dist-packages/batch_invariant_ops && touch /usr/lib/python3/dist-packages/batch_invariant_ops/__init__.py'
build samebits-ascend-base samebits:ascend-standin || fail "the ascend target does not build"
say "built: $(grep -c . docker/locks/ascend.lock) locked packages and our wheel on the stand-in"

standin samebits-ascend-broken 'echo Download failed, skipping'
if build samebits-ascend-broken samebits:ascend-broken; then fail "an image without the operator library was built"; fi
grep -q 'batch_invariant_ops) could not be installed: no image' "$log" || fail "the build failed for another reason"
say "no image without the operator library: $(grep -o 'the AscendC batch-invariant library.*no image' "$log" | tail -1)"

container=$(buildah from --pull-never localhost/samebits:ascend-standin)
trap 'buildah rm "$container" > /dev/null' EXIT
run() { buildah run --isolation chroot --user 1000:0 "$container" -- "$@"; }
code=0
words=$(run on-ascend samebits serve 2>&1) || code=$?
case $words in *"no Ascend card in this container"*) ;; *) echo "$words"; fail "the entry point says something else" ;; esac
say "started without a card: $(grep -o 'samebits: no Ascend.*' <<< "$words" | cut -c1-100)…"
[ "$(wc -l <<< "$(grep samebits: <<< "$words")")" = 1 ] || fail "more than one line"
[ $code = 2 ] || fail "exit code $code, not 2"
say "exit code 2, one line"
[ "$(run id -u)" = 1000 ] && run test -w /var/lib/samebits && say "user 1000 writes the volume and nothing else of ours"
run test ! -w /usr/local/bin/on-ascend || fail "the entry point can be written"
echo "all of it holds"
