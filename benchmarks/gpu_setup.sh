#!/usr/bin/env bash
# On a GPU machine that reaches no package registry: vLLM, its requirements and a small real target out of
# parts that were carried there. Usage: gpu_setup.sh PARTS SITE
#   PARTS  folder with p00, p01, ... (a split tar of vllm.tar.xz and of wheels)
#   SITE   folder to install into; afterwards:
#          export PYTHONPATH=SITE:src HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
set -euo pipefail
parts=$(cd "$1" && pwd)
mkdir -p "$2"
site=$(cd "$2" && pwd)
cat "$parts"/p?? | tar -xf - -C "$parts"
tar -xJf "$parts/vllm.tar.xz" -C "$site"
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$site"/whl/*.whl "$parts"/*.whl
