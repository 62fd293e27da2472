#!/usr/bin/env bash
# Install Chromium and its driver, for tests/browser: Debian's own, from the machine's package sources.
set -euo pipefail
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
apt-get -q -o DPkg::Lock::Timeout=300 update
apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends chromium chromium-driver
