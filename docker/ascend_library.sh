#!/usr/bin/env bash
# Puts the AscendC batch-invariant library into an image of vllm-ascend, with the image's own script, and fails if the
# library is not there afterwards. That script gives one download 3 seconds, trusts any certificate, and only logs a
# failure; here it gets 5 minutes, checks certificates, and is tried three times.
#   ascend_library.sh ascend910b|ascend910_93 [root of the file system, for tests]
set -eo pipefail
soc=$1 root=${2:-}
case $soc in
  ascend910b | ascend910_93) ;;
  *) echo "SOC=$soc: expected ascend910b (Atlas A2) or ascend910_93 (Atlas A3)" >&2; exit 1 ;;
esac
for file in "$root/usr/local/Ascend/ascend-toolkit/set_env.sh" "$root/usr/local/Ascend/nnal/atb/set_env.sh"; do
  if [ ! -r "$file" ]; then
    echo "$file is not there: ASCEND_BASE must be an image of vllm-ascend with CANN and NNAL" >&2; exit 1
  fi
  source "$file"
done
there() { python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("batch_invariant_ops") is None)'; }
installer=$root/vllm-workspace/vllm-ascend/csrc/build_batch_invariant_ops.sh
for attempt in 1 2 3; do
  there && break
  if [ ! -r "$installer" ]; then
    echo "no batch_invariant_ops, and no $installer to install it: take another ASCEND_BASE" >&2; exit 1
  fi
  work=$(mktemp -d)
  (cd "$work" && sed -e 's/--max-time [0-9]*/--max-time 300/; s/ -k / /' "$installer" > install.sh \
    && bash install.sh "$soc" 2>&1 | tee log) || true
  if grep -qiE 'failed|not found|skipping' "$work/log"; then echo "attempt $attempt did not install everything" >&2; fi
  rm -rf "$work"
done
if ! there; then
  echo "the AscendC batch-invariant library (batch_invariant_ops) could not be installed: no image" >&2; exit 1
fi
echo "batch_invariant_ops is there"
