#!/usr/bin/env bash
# Builds run.cpp with the headers and libraries of the torch that `python` (or $PYTHON) has: build.sh OUTPUT
set -euo pipefail
python="${PYTHON:-python}"
torch="$("$python" -c 'import torch, os; print(os.path.dirname(torch.__file__))')"
abi="$("$python" -c 'import torch; print(int(torch.compiled_with_cxx11_abi()))')"
"${CXX:-g++}" -std=c++20 -O1 -D_GLIBCXX_USE_CXX11_ABI="$abi" "$(dirname "$0")/run.cpp" -o "$1" \
  -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
  -L"$torch/lib" -Wl,-rpath,"$torch/lib" -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10
