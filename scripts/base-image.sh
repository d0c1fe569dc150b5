#!/usr/bin/env bash
# Makes a base image for docker/Dockerfile out of Debian's packages, where no registry can be reached.
#
#   scripts/base-image.sh NAME     needs root, debootstrap, and buildah or docker; MIRROR=... names a mirror other than
#                                  debootstrap's own
#
# The image is Debian bookworm's smallest, with its security updates, Python 3.11 and the CA certificates.
set -euo pipefail

name=${1:?usage: scripts/base-image.sh NAME}
suite=bookworm
root=$(mktemp -d)
archive=$(mktemp --suffix .tar)
trap 'rm -rf "$root" "$archive"' EXIT

chmod 755 "$root" # it becomes the image's
debootstrap --variant=minbase --exclude=e2fsprogs,tzdata "$suite" "$root" ${MIRROR:+"$MIRROR"}
mirror=$(awk '$1 == "deb" { print $2; exit }' "$root/etc/apt/sources.list")
{
    echo "deb $mirror $suite main"
    echo "deb $mirror $suite-updates main"
    echo "deb $mirror-security $suite-security main"
} >"$root/etc/apt/sources.list"
cp /etc/resolv.conf "$root/etc/resolv.conf"
chroot "$root" sh -euc '
    export DEBIAN_FRONTEND=noninteractive
    apt-get --quiet update
    apt-get --quiet --yes dist-upgrade
    apt-get --quiet --yes --no-install-recommends install ca-certificates python3.11
'

# What nobody reads in a container, and what differs from one run to the next.
rm -rf "$root"/usr/share/{doc,info,locale,man}/* "$root"/var/cache/{apt,debconf}/* "$root"/var/lib/apt/lists/* \
    "$root"/var/cache/ldconfig "$root"/var/log/* "$root"/etc/resolv.conf "$root"/etc/hostname
tar --directory "$root" --create --numeric-owner --file "$archive" .

if command -v buildah >/dev/null; then
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$archive" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --rm "$container" "$name"
else
    docker import "$archive" "$name"
fi
