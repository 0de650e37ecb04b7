#!/bin/sh
# Download the wheels that `make gpu` needs on a machine without a network, about 12 MB: toolkit's requirements for
# Python 3.12 on x86-64, except torch, numpy, h5py and mpi4py, which that machine has. Usage: scripts/gpu_wheels.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/gpu-wheels}
rm -rf "$folder"
# The requirements of setup.cfg, and what they require themselves.
for name in click jinja2 markupsafe nvidia-ml-py pydantic pydantic-core annotated-types typing-inspection \
    typing-extensions rich markdown-it-py mdurl pygments submitit cloudpickle tomlkit xxhash; do
  echo "$name"
done > build/gpu-requirements.txt
${PYTHON:-python3} -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  --platform manylinux1_x86_64 --constraint constraints.txt --dest "$folder" --requirement build/gpu-requirements.txt
kilobytes=$(du -sk "$folder" | cut -f1)
echo "$(ls "$folder" | wc -l) wheels in $folder, $kilobytes kB"
[ "$kilobytes" -le 20480 ] || { echo "expected at most 20 MB" >&2; exit 1; }
