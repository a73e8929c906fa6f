#!/usr/bin/env bash
# Tests and bench of the GPU side, on a machine with a GPU and perhaps no internet, in at most ten minutes.
#
#   bench/gpu_run.sh [--wheels DIR] [--kernels DIR] [--out DIR] [--minutes N] [--python PATH] [--tests-only]
#
# The Python must have numpy, safetensors, cuda-core, numba-cuda, torch and pytest (with hypothesis and pytest-timeout);
# CuPy, Triton, JAX, ml_dtypes and pytest-xdist are used if installed. Missing packages are unpacked from the wheels in DIR.
# The extension of this tree is read from a wheel of it in DIR (pip wheel --no-deps -w DIR . on a machine with the same
# Python); without such a wheel it is built, which needs a compiler and Cython. Kernels are read from the folder
# --kernels (python -m kvstore.kernels.cuda build DIR), or are compiled.
#
# Written to OUT: machine.txt, kernels.txt, tests.txt, sanitizer.txt, bench.txt, device.md, device.json. Each step has its share of the time, and the
# script ends with the number of the steps that failed.
set -u

tree=$(cd "$(dirname "$0")/.." && pwd)
wheels= kernels= out=$PWD/gpu-run minutes=10 python=python3 bench=yes
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$(cd "$2" && pwd); shift 2 ;;
        --kernels) kernels=$(cd "$2" && pwd); shift 2 ;;
        --out) mkdir -p "$2"; out=$(cd "$2" && pwd); shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --tests-only) bench=no; shift ;;
        *) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 64 ;;
    esac
done

mkdir -p "$out"
start=$(date +%s)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
failed=0

left() { echo $((start + minutes * 60 - $(date +%s) - $1)); }
step() { echo "== $1 ($(($(date +%s) - start)) s)"; }

# Everything is imported from one folder, never from the tree itself: kernels/ is installed as kvstore.kernels.
lay_out() {
    if [ -n "$wheels" ] && ls "$wheels"/*.whl > /dev/null 2>&1; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || return 1
    fi
    if ! [ -d "$site/kvstore" ] && built=$(build); then
        cp -r "$tree/kvstore" "$site/kvstore"
        cp -r "$tree/kernels" "$site/kvstore/kernels"
        find "$site/kvstore" -name '*.so' -delete
        cp -r "$built/." "$site/"
    fi
    ln -s "$tree/bench" "$site/bench"
    [ -d "$site/kvstore" ]
}

# Compile into a folder of its own and name it.
build() {
    command -v "${CC:-cc}" > /dev/null || return 1
    "$python" -c 'import Cython, setuptools' 2> /dev/null || return 1
    (cd "$tree" && "$python" setup.py -q build_ext --build-lib "$site/.lib" --build-temp "$site/.temp") 1>&2 || return 1
    echo "$site/.lib"
}

step "installing"
if ! lay_out; then
    echo "kvstore could neither be built here nor found among the wheels" >&2
    exit 70
fi
export PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export XDG_CACHE_HOME=$site/.cache
cd "$site" || exit 70

step "machine"
{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1
    "$python" - << 'PY'
import importlib.metadata as metadata, platform
print(platform.platform(), "Python", platform.python_version())
for name in ("numpy", "torch", "cupy-cuda13x", "triton", "jax", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "safetensors"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not there")
from cuda.core import Device
from kvstore.devices import driver
made = driver.get()
capability = Device(0).compute_capability
print(made.count, "GPU(s), compute capability", capability, "free, total", made.memory(0))
PY
} | tee "$out/machine.txt"

step "kernels, compiled by all cores"
arch=$("$python" -c 'from cuda.core import Device; print("sm_%d%d" % Device(0).compute_capability)' 2> /dev/null)
if [ -n "$kernels" ]; then
    export KVSTORE_CUDA_KERNELS=$kernels
elif [ -n "$arch" ]; then
    export KVSTORE_CUDA_KERNELS=$site/.kernels
    "$python" - << 'PY' | timeout 120 xargs -L 1 -P "$(nproc)" "$python" -m kvstore.kernels.cuda build \
        "$KVSTORE_CUDA_KERNELS" --arch "$arch" > "$out/kernels.txt" 2>&1
from kvstore.kernels.cuda import all_specs
names = [spec.name for spec in all_specs()]
for start in range(0, len(names), 8):
    print(*(f"--kernel {name}" for name in names[start : start + 8]))
PY
    [ $? -eq 0 ] || { tail -n 5 "$out/kernels.txt"; failed=$((failed + 1)); }
else
    echo "no GPU can be used here" >&2
fi

# Tests that measure the free memory of the GPU run alone; the other tests share it.
gpu_tests() {
    timeout "$(left $((minutes * 30)))" "$python" -m pytest -c "$tree/pyproject.toml" --rootdir "$tree" \
        -p no:cacheprovider -W default -m gpu -q --durations=10 "$@" 2>&1 | tee -a "$out/tests.txt"
    case ${PIPESTATUS[0]} in
        0 | 5) ;;  # 5: no such test was collected
        *) failed=$((failed + 1)) ;;
    esac
}

step "tests"
: > "$out/tests.txt"
side=
if "$python" -c 'import xdist' 2> /dev/null; then
    side="-n 6"
fi
alone=memory_is_back
# shellcheck disable=SC2086  # two words
gpu_tests $side -k "not $alone" "$tree"/tests/stores/device "$tree"/tests/kernels/cuda
gpu_tests -k $alone "$tree"/tests/stores/device/test_device_gpu.py
step "tests of several processes"
gpu_tests "$tree"/tests/stores/shared/test_shared_{gpu,ipc}.py "$tree"/tests/stores/collectives/test_nccl.py \
    "$tree"/tests/stores/parameter_server/test_dist_gpu.py

if command -v compute-sanitizer > /dev/null && [ "$(left 240)" -gt 30 ]; then
    step "compute-sanitizer"
    timeout 90 compute-sanitizer --error-exitcode 9 "$python" -m pytest -c "$tree/pyproject.toml" --rootdir "$tree" \
        -p no:cacheprovider -W default -m gpu -q "$tree/tests/stores/device/test_device_gpu.py" \
        -k "test_plans or (test_sums and float32 and 4) or (test_compressed and 2bit)" > "$out/sanitizer.txt" 2>&1
    status=$?
    tail -n 5 "$out/sanitizer.txt"
    [ $status -eq 0 ] || [ $status -eq 124 ] || failed=$((failed + 1))
fi

if [ $bench = yes ]; then
    step "bench"
    timeout "$(left 5)" "$python" -m bench device --write "$out/device" --seconds "$(left 45)" 2>&1 | tee "$out/bench.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=$((failed + 1))
fi

step "done, $failed failed"
exit $failed
