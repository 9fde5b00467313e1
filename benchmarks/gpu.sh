#!/usr/bin/env bash
# Checks and measures this package on a GPU that is lent for minutes, without a network: at most 64 MiB travel there.
#   here:   benchmarks/gpu.sh pack DATA [CHECK SPEED SCIENCE]   from a clean checkout; prints the size
#   there:  bash .gpu/gpu.sh check      is it right? CHECK seconds (130); needs .gpu
#           bash .gpu/gpu.sh measure    how fast, and what comes out? SPEED and SCIENCE seconds (180, 230); needs .gpu
#   here:   benchmarks/gpu.sh unpack [OUT]      the whole checkout again; results of OUT join docs/gpu.json and its page
# DATA has cifar10_jpeg.npz, cifar10_npz.py and splits/, as docs/guides/gpu.md says. Each leg takes half a minute more
# than its seconds at most. There, $OUT gets gpu.json, gpu.log, machine.txt and runs.tgz while the work goes on, so a
# kill loses nothing. What docs/gpu.json has of a like machine, and was right, is not done again. DEVICE=cpu does
# everything in small. What follows check or measure is for gpu.py.
set -euo pipefail
DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3} OUT=${OUT:-$PWD/runs/gpu} WORK=${WORK:-/tmp/gpu}
SPLIT=cifar10_federated_train_alpha_0.05.json
LIMIT=62 # MiB

travelling() { # names of all files that would travel, each with a 0 behind it
    git ls-files -co --exclude-standard -z | while IFS= read -r -d '' name; do
        [[ ! -e $name ]] || printf '%s\0' "$name"
    done
    find .gpu -type f -print0
}

pack() {
    data=$1 limits=("${@:2}")
    [[ ${#limits[@]} -gt 0 ]] || limits=(130 180 230)
    [[ ${#limits[@]} -eq 3 && -z $(git status --porcelain) ]] || { echo "gpu.sh: give three limits, and commit first" >&2; exit 1; }
    grep -qx /.gpu/ "$(git rev-parse --git-path info/exclude)" || echo /.gpu/ >>"$(git rev-parse --git-path info/exclude)"
    rm -rf .gpu && mkdir .gpu
    $PYTHON -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d .gpu jsonargparse docstring-parser typeshed-client
    cp benchmarks/gpu.sh "$data/cifar10_jpeg.npz" "$data/cifar10_npz.py" "$data/splits/$SPLIT" .gpu/
    echo "${limits[@]}" >.gpu/limits
    git rev-parse --short HEAD >.gpu/commit
    [[ ! -e docs/gpu.json ]] || cp docs/gpu.json .gpu/
    git sparse-checkout set --no-cone '/*' '!/ledger/' '!/docs/' '!/tests/' '!/notebooks/'
    travelling | du -b --files0-from=- -c | tail -1 |
        awk -v limit=$LIMIT '{printf "%.1f MiB of %d travel\n", $1 / 1048576, limit; exit $1 > limit * 1048576}'
}

start() {
    mkdir -p "$OUT" "$WORK/runs"
    ln -sfn "$WORK/runs" "$OUT/runs" # checkpoints do not come back
    read -r check speed science <.gpu/limits
    COMMIT=$(cat .gpu/commit)
    [[ -e $OUT/gpu.json || ! -e .gpu/gpu.json ]] || cp .gpu/gpu.json "$OUT/gpu.json"
    export COMMIT PYTHONPATH=$PWD:$WORK/site PYTHONUNBUFFERED=1 WANDB_MODE=offline TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" .gpu/*.whl
    { date && { nvidia-smi || true; } && uname -a && nproc && $PYTHON -m pip list; } >"$OUT/machine.txt" 2>&1
}

leg() { # the rest are legs and arguments of gpu.py; what hangs all the same ends
    # in the foreground it stays in this process group, and is killed with it; else it would write beside its successor
    timeout --foreground -k 5 $(($1 + 60)) \
        $PYTHON -m benchmarks.gpu --device "$DEVICE" --out "$OUT/gpu.json" "${@:2}" || echo "rc $?"
}

keep() { # at most 16 MiB come back: what the runs have measured, not their weights
    tar czf "$WORK/runs.tgz" --exclude=checkpoints --exclude='rows*' -C "$WORK" runs 2>/dev/null || true
    mv -f "$WORK/runs.tgz" "$OUT/runs.tgz"
}

measure() {
    $PYTHON .gpu/cifar10_npz.py "$PWD/.gpu/cifar10.npz" & decoding=$!
    (while sleep 15; do keep; done) & keeping=$!
    leg $((speed + science)) "speed=$speed" "$@"
    wait $decoding
    leg "$science" "science=$science" "$@" -- --data Arrays --data.path "$PWD/.gpu/cifar10.npz" \
        --data.partition FromFile --data.partition.path "$PWD/.gpu/$SPLIT"
    kill $keeping
    keep
}

unpack() {
    git sparse-checkout disable
    rm -rf .gpu
    [[ $# -eq 0 ]] || PYTHONPATH=$PWD $PYTHON -m benchmarks.gpu --join "$1/gpu.json" --out docs/gpu.json --report docs/guides/gpu.md
}

case ${1:-} in
pack) [[ $# -gt 1 ]] || { echo "gpu.sh: pack needs the folder of the data" >&2; exit 1; }; pack "${@:2}" ;;
check) start && leg "$check" "correctness=$check" "${@:2}" ;;
measure) start && measure "${@:2}" ;;
unpack) unpack "${@:2}" ;;
*) sed -n '2,11s/^# \?//p' "$0"; exit 1 ;;
esac
