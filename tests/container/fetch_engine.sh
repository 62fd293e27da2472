#!/usr/bin/env bash
# Unpack a container engine into a folder, for tests/container: Debian's own, from the machine's package sources.
# Nothing is installed: no service, no group, no rule of the firewall.
set -euo pipefail
folder=${1:?usage: fetch_engine.sh FOLDER}
[ -x "$folder/usr/sbin/dockerd" ] && exit 0
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
apt-get -q -o DPkg::Lock::Timeout=300 update
(cd "$packages" && apt-get -q -o DPkg::Lock::Timeout=300 download docker.io containerd runc tini)
mkdir -p "$folder"
for package in "$packages"/*.deb; do dpkg -x "$package" "$folder"; done
