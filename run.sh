#!/usr/bin/env bash
# One command from a fresh machine:
#
#   bash run.sh demo         set up, then teach a tiny agent: gen, rollout, sft, eval, dppo, eval (minutes on two cores)
#   bash run.sh test         set up, then run the tests
#   bash run.sh setup        set up, and no more
#   bash run.sh ablations    set up, then the demo with other losses and groups, three seeds each (an hour and more)
#
# Set-up makes .venv, installs requirements.txt into it, and gets bubblewrap where that takes no password.
#   PYTHON=python3.12       another interpreter (3.11 or newer)
#   TORCH_INDEX=URL         another wheel index for torch: with PyTorch's own CPU index (see its install page) a Linux
#                           machine downloads 200 MB instead of the CUDA build's gigabytes
#   OUT=runs/demo SEED=0    where it writes, and the seed of the demo (SEEDS="0 1 2": those of the ablations)
#   TASKS=4000 STEPS=30     training tasks and RL steps
set -euo pipefail
cd "$(dirname "$0")"
export CUDA_VISIBLE_DEVICES="" # all of this is made for the CPU; on a GPU the scripts want torchrun
# A thread that waits for the other sleeps: spinning makes training 5% faster on an idle machine, and takes twice the
# time where one other program is busy.
export OMP_WAIT_POLICY=PASSIVE

say() { printf '%s\n' "$*" >&2; }

setup() {
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "Python 3.11 or newer is needed; say which with PYTHON=/path/to/python3.12 bash run.sh ..."
        exit 1
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # shellcheck disable=SC1091
    . .venv/bin/activate
    if ! cmp -s requirements.txt .venv/installed.txt; then
        if [ -n "${TORCH_INDEX:-}" ]; then
            python -m pip install -q --index-url "$TORCH_INDEX" "$(grep -o '^torch==[0-9.]*' requirements.txt)"
        fi
        python -m pip install -q -r requirements.txt
        cp requirements.txt .venv/installed.txt
    fi
    sandbox
}

# Something must run the agent's commands: bubblewrap, which needs no daemon, or else Docker. Sets BACKEND.
sandbox() {
    if [ "$(uname)" = Linux ] && ! command -v bwrap >/dev/null; then
        local root="" get=""
        [ "$(id -u)" = 0 ] || root="sudo -n"
        if command -v apt-get >/dev/null; then get="apt-get install -y bubblewrap"
        elif command -v dnf >/dev/null; then get="dnf install -y bubblewrap"
        elif command -v pacman >/dev/null; then get="pacman -S --noconfirm bubblewrap"
        elif command -v apk >/dev/null; then get="apk add bubblewrap"
        fi
        if [ -n "$get" ]; then
            say "\$ $root $get"
            $root $get >/dev/null 2>&1 || { command -v apt-get >/dev/null && $root apt-get update >/dev/null 2>&1 &&
                $root $get >/dev/null 2>&1; } || say "that did not work; install bubblewrap by hand: sudo $get"
        fi
    fi
    # bubblewrap first: it starts an episode in milliseconds, where Docker builds an image and starts a container.
    BACKEND=$(python -c 'import sys, sandbox
try:
    print(sandbox.resolve_backend("bwrap"))
except sandbox.InfraError as e:
    print(f"bubblewrap does not work here, so Docker is used, which takes much longer: {e}", file=sys.stderr)
    try:
        print(sandbox.resolve_backend("docker"))
    except sandbox.InfraError as e:
        sys.exit(str(e))')
    if [ "$BACKEND" = docker ]; then python gen.py bases --domain core; fi
}

# ------------------------------------------------------------------------------------------------------------
# The stages, as one would type them. Episodes of the built-in tasks are short: 5 turns of 40 tokens and 250 tokens
# in all, at most; T = 1.

limits() { echo "--max-turns 5 --max-turn-tokens 40 --max-tokens 250 --temperature 1 --top-p 1 --backend $BACKEND"; }

TABLE=""
stage() { # stage NAME COMMAND...: shows the command, runs it, keeps its time
    local name=$1 started=$SECONDS
    shift
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
    TABLE+=$(printf '%-34s %4d s' "$name" $((SECONDS - started)))$'\n'
}

fresh() { # fresh FOLDER: an empty one; what was there is moved, not lost
    if [ -e "$1" ]; then
        local old
        old="$1.$(date +%Y%m%d-%H%M%S)"
        mv "$1" "$old"
        say "the results that were in $1 are now in $old"
    fi
    mkdir -p "$1"
}

warm_start() { # warm_start FOLDER SEED: from nothing to tasks and a model that imitates their demonstrator
    local out=$1 seed=$2
    stage "tasks" python gen.py builtin --n "${TASKS:-4000}" --seed "$seed" --split train --out "$out/tasks.jsonl"
    stage "validation tasks" python gen.py builtin --n 90 --seed "$seed" --split val --out "$out/val.jsonl"
    stage "test tasks" python gen.py builtin --n 180 --seed "$seed" --split test --out "$out/test.jsonl"
    stage "demonstrations" python rollout.py --tasks "$out/tasks.jsonl" --oracle --backend "$BACKEND" \
        --out "$out/demos.jsonl"
    stage "tokenizer and model" python builtin/tiny.py --rollouts "$out/demos.jsonl" --seed "$seed" --out "$out/tiny"
    stage "supervised fine-tuning" env OMP_NUM_THREADS=2 python sft.py \
        --model "$out/tiny" --rollouts "$out/demos.jsonl" --out "$out/sft" --seed "$seed" \
        --epochs 5 --batch-size 16 --lr 2e-3 --beta2 0.98 --micro-batch-tokens 2048 --no-gradient-checkpointing
}

reinforce() { # reinforce FROM OUT SEED FLAGS...: FROM is a folder of warm_start
    local from=$1 out=$2 seed=$3
    shift 3
    # One thread for the trainer and one for the sampler, which run at the same time.
    # shellcheck disable=SC2046
    stage "reinforcement learning" env OMP_NUM_THREADS=1 python dppo.py \
        --model "$from/sft/last" --tasks "$from/tasks.jsonl" --out "$out" --seed "$seed" \
        --max-refill 2 --steps "${STEPS:-30}" --beta2 0.95 \
        --micro-batch-tokens 1024 --no-gradient-checkpointing \
        --eval-tasks "$from/val.jsonl" --eval-every 10 --eval-attempts 1 $(limits) "$@"
}

evaluate() { # evaluate NAME MODEL TASKS OUT ATTEMPTS
    # shellcheck disable=SC2046
    stage "$1" env OMP_NUM_THREADS=2 python eval.py run --tasks "$3" --model "$2" --attempts "$5" --out "$4" $(limits)
}

pass1() { # pass1 EVAL_FILE: "30.6% +- 2.6%"
    python eval.py report --json "$1" | python -c 'import json, sys
s = json.loads(sys.stdin.readline())
print("pass@1 %.1f%% +- %.1f%%" % (100 * s["pass_at_k"]["1"], 100 * s["se_tasks"]))'
}

demo() {
    local out=${OUT:-runs/demo} seed=${SEED:-0}
    fresh "$out"
    warm_start "$out" "$seed"
    evaluate "test after SFT" "$out/sft/last" "$out/test.jsonl" "$out/eval_sft.jsonl" 2
    reinforce "$out" "$out" "$seed" --prompts 16 --group-size 8 --lag 1 --workers 64 --lr 6e-4
    evaluate "test after RL" "$out/last" "$out/test.jsonl" "$out/eval_rl.jsonl" 2
    stage "learning curve" python eval.py plot "$out" --out "$out/curve.png"

    printf '\n%s\nafter SFT: %s\nafter RL:  %s\ncurve:     %s\n' \
        "$TABLE" "$(pass1 "$out/eval_sft.jsonl")" "$(pass1 "$out/eval_rl.jsonl")" "$out/curve.png"
}

# The paper's Figures 7, 8 and 9 in miniature: what the mask does under lag, the size of groups, pass@k. All that
# may be in flight is (640 episodes), so that what is trained on is four steps old indeed, and the learning rate is
# higher: at the demo's own setting few tokens are cut.
ablations() {
    local out=${OUT:-runs/ablations} seed run flags
    fresh "$out"
    for seed in ${SEEDS:-0 1 2}; do
        mkdir -p "$out/warm-s$seed" "$out/dppo-s$seed"
        warm_start "$out/warm-s$seed" "$seed"
        evaluate "test after SFT" "$out/warm-s$seed/sft/last" "$out/warm-s$seed/test.jsonl" \
            "$out/dppo-s$seed/eval_sft.jsonl" 8
        while read -r run flags; do
            # shellcheck disable=SC2086
            reinforce "$out/warm-s$seed" "$out/$run-s$seed" "$seed" --lag 4 --workers 640 --lr 1e-3 $flags </dev/null
            evaluate "test after $run" "$out/$run-s$seed/last" "$out/warm-s$seed/test.jsonl" \
                "$out/$run-s$seed/eval_rl.jsonl" 8 </dev/null
        done <<'RUNS'
dppo      --loss dppo --prompts 16 --group-size 8
grpo      --loss grpo --prompts 16 --group-size 8
no-mask   --loss reinforce --prompts 16 --group-size 8
group-32  --loss dppo --prompts 4 --group-size 32
RUNS
    done
    stage "losses under lag" python eval.py plot "$out"/{dppo,grpo,no-mask}-s* --out "$out/losses.png"
    stage "size of groups" python eval.py plot "$out"/{dppo,group-32}-s* --out "$out/groups.png"
    for run in dppo grpo no-mask group-32; do
        for seed in ${SEEDS:-0 1 2}; do
            TABLE+="$run, seed $seed: $(pass1 "$out/$run-s$seed/eval_rl.jsonl")"$'\n'
        done
    done
    printf '\n%s' "$TABLE"
}

case "${1:-}" in
    setup) setup ;;
    demo) setup; demo ;;
    ablations) setup; ablations ;;
    test) shift; setup; python -m pytest -q test_all.py "$@" ;;
    *) say "usage: bash run.sh demo | test [pytest arguments] | setup | ablations"; exit 2 ;;
esac
