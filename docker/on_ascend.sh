#!/usr/bin/env bash
# Entry point of the ascend image: CANN's variables, a look at the cards, then the command itself in this very process.
# Exit code 2 with one line when the container was started without what an NPU needs.
#   on-ascend samebits serve …        ON_ASCEND_ROOT: another root of the file system, for tests
set -eo pipefail
root=${ON_ASCEND_ROOT:-}
refuse() { echo "samebits: $1" >&2; exit 2; }
compgen -G "$root/dev/davinci[0-9]*" > /dev/null || refuse "no Ascend card in this container (/dev/davinci0 …): \
start it with --device /dev/davinci0 and the manager's nodes; see docker/compose.ascend.yaml"
for node in davinci_manager devmm_svm hisi_hdc; do
  [ -e "$root/dev/$node" ] || refuse "/dev/$node is not in this container: start it with --device /dev/$node"
done
[ -e "$root/usr/local/Ascend/driver/lib64" ] || refuse "the host's driver is not in this container: \
start it with -v /usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64:ro"
[ -r "$root/usr/local/Ascend/driver/version.info" ] || refuse "the driver's version is not to be read: \
start it with -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info:ro"
for file in ascend-toolkit/set_env.sh nnal/atb/set_env.sh; do
  [ -r "$root/usr/local/Ascend/$file" ] || refuse "/usr/local/Ascend/$file can't be read: the image has no CANN or no NNAL"
  source "$root/usr/local/Ascend/$file"
done
# The image of vllm-ascend sets this in a login shell only.
jemalloc=/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2
[ -z "$LD_PRELOAD" ] && [ -e "$jemalloc" ] && export LD_PRELOAD=$jemalloc
exec "$@"
