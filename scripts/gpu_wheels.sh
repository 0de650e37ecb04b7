#!/bin/sh
# Download the wheels that `make gpu` needs on a machine without a network, about 6 MB: toolkit's requirements for
# Python 3.12 on x86-64, except torch, numpy, h5py and mpi4py, which that machine has. `gpu_wheels.sh quantized` adds
# bitsandbytes, 43 MB.
set -eu
cd "$(dirname "$0")/.."
folder=build/gpu-wheels
rm -rf "$folder"
# Without --no-deps, pip would also download what that machine has.
${PYTHON:-python3} -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  --platform manylinux1_x86_64 --platform manylinux_2_24_x86_64 --constraint constraints.txt --dest "$folder" \
  click jinja2 markupsafe nvidia-ml-py pydantic pydantic-core annotated-types typing-inspection typing-extensions \
  rich markdown-it-py mdurl pygments submitit cloudpickle tomlkit xxhash ${1:+bitsandbytes}
kilobytes=$(du -sk "$folder" | cut -f1)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder, $kilobytes kB"
[ "$kilobytes" -le 53248 ] || { echo "expected at most 52 MB" >&2; exit 1; }
