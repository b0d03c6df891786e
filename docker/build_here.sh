#!/usr/bin/env bash
# Builds the cpu image and proves it where there is no Docker engine: as root on Debian, with buildah and debootstrap.
#   docker/build_here.sh [folder for the base, the log and the volume; default: the user's cache]
# Elsewhere: docker build --target cpu -t samebits:cpu .
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/samebits-image}")
for tool in buildah debootstrap; do
  command -v $tool > /dev/null || { echo "$tool is not installed: apt-get install buildah debootstrap" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "needs root: chroot isolation and mounts" >&2; exit 2; }
mkdir -p "$work"

if ! buildah inspect --type image localhost/samebits-base > /dev/null 2>&1; then
  echo "== base: Debian bookworm by debootstrap"
  [ -e "$work/base/etc/debian_version" ] \
    || debootstrap --variant=minbase --include=ca-certificates bookworm "$work/base" > "$work/debootstrap.log"
  # Behind a proxy with a certificate of its own, the build has to trust what this machine trusts.
  cp /etc/ssl/certs/ca-certificates.crt "$work/base/etc/ssl/certs/ca-certificates.crt"
  container=$(buildah from scratch)
  buildah copy -q "$container" "$work/base" / > /dev/null
  buildah config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
  buildah commit -q --rm "$container" localhost/samebits-base > /dev/null
fi

echo "== build: target cpu"
mirror=()
for name in PIP_INDEX_URL UV_DEFAULT_INDEX; do [ -z "${!name:-}" ] || mirror+=(--build-arg "$name=${!name}"); done
began=$SECONDS
buildah bud -q --isolation chroot --format docker --layers --target cpu -t localhost/samebits:cpu \
  --build-arg CPU_BASE=localhost/samebits-base "${mirror[@]}" . > "$work/build.log"
echo "built in $((SECONDS - began)) s"
buildah inspect --type image --format \
  '{{.Docker.Config.User}} | {{.Docker.Config.Entrypoint}} | {{.Docker.Config.Healthcheck.Test}}' localhost/samebits:cpu

echo "== proof"
container=$(buildah from --pull-never localhost/samebits:cpu)
trap 'buildah umount "$container" > /dev/null; buildah rm "$container" > /dev/null' EXIT
.venv/bin/python docker/proof.py "$(buildah mount "$container")" "$work"
