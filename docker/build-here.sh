#!/usr/bin/env bash
# Builds the image without a Docker engine: `docker/build-here.sh [TAG]`, as root on Debian.
# debootstrap makes the base image, buildah runs the Dockerfile, and podman's store holds the result. Needs: apt-get install buildah podman debootstrap runc, and qemu-user-static to try the image.
set -eu
cd "$(dirname "$0")/.."
tag=${1:-cflow}
base=localhost/cflow-base:bookworm
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf --one-file-system "$root"' EXIT
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root"
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
        "$root"/usr/share/{doc,man,info,locale}/*
    tar -C "$root" -c . | podman import - "$base"
fi

# The build uses the machine's own package index and certificates, if these are set.
lent=()
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    if [ -e "$file" ]; then lent+=(--volume "$file:$file:ro"); fi
done
buildah bud --layers --format docker --build-arg "BASE=$base" "${lent[@]}" -f docker/Dockerfile -t "$tag" .
podman image inspect --format '{{.Size}} bytes in {{len .RootFS.Layers}} layers' "$tag"
