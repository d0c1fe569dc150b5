#!/bin/sh
# Makes the virtual environments that the Dockerfile's stages fill: /opt/build, with pip, and /opt/espalier, without.
set -eu
apt-get update --quiet
apt-get install --quiet --yes --no-install-recommends binutils # for strip
# Debian's Python has no ensurepip of its own.
python3.11 -c 'import ensurepip' 2>/dev/null || apt-get install --quiet --yes --no-install-recommends python3.11-venv
python3.11 -m venv /opt/build
python3.11 -m venv --without-pip /opt/espalier
