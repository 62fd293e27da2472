#!/usr/bin/env bash
# Unpack SLURM and Snakemake's plugin for it into a folder, for tests/slurm: Debian's own SLURM, from the machine's package
# sources. Nothing is installed: no service, no user, nothing under /etc. The plugin stays out of the project's own
# environment, because every start of Snakemake imports every plugin that it finds there.
set -euo pipefail
folder=${1:?usage: fetch_slurm.sh FOLDER PYTHON}
python=${2:?usage: fetch_slurm.sh FOLDER PYTHON}
root=$(cd "$(dirname "$0")/../.." && pwd)
[ -e "$folder/complete" ] && exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
apt-get -q -o DPkg::Lock::Timeout=300 update
(cd "$scratch" && apt-get -q -o DPkg::Lock::Timeout=300 download \
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0)
mkdir -p "$folder"
for package in "$scratch"/*.deb; do dpkg -x "$package" "$folder"; done
# Only what the project's environment lacks: the rest of it must stay the one that is tested.
"$python" -m pip install --quiet --no-compile --no-deps --target "$folder/python" \
    --constraint "$root/constraints.txt" \
    snakemake-executor-plugin-slurm snakemake-executor-plugin-slurm-jobstep pandas python-dateutil tzdata
touch "$folder/complete"
