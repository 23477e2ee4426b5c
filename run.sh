#!/usr/bin/env bash
# One command from a fresh machine:
#
#   bash run.sh demo    set up, then teach a tiny agent: gen, rollout, sft, eval, dppo, eval (minutes on two cores)
#   bash run.sh test    set up, then run the tests
#
# Set-up makes .venv, installs requirements.txt into it, and gets bubblewrap where that takes no password.
#   PYTHON=python3.12       another interpreter (3.11 or newer)
#   TORCH_INDEX=URL         another wheel index for torch: with PyTorch's own CPU index (see its install page) a Linux
#                           machine downloads 200 MB instead of the CUDA build's gigabytes
#   OUT=runs/demo SEED=0    where the demo writes, and its seed
#   TASKS=4000 STEPS=50     training tasks and RL steps of the demo
set -euo pipefail
cd "$(dirname "$0")"

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
}

# ------------------------------------------------------------------------------------------------------------
# demo

TABLE=""
stage() { # stage NAME COMMAND...: shows the command, runs it, keeps its time
    local name=$1 started=$SECONDS
    shift
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
    TABLE+=$(printf '%-34s %4d s' "$name" $((SECONDS - started)))$'\n'
}

pass1() { # pass1 EVAL_FILE: "30.6% +- 2.6%"
    python eval.py report --json "$1" | python -c 'import json, sys
s = json.loads(sys.stdin.readline())
print("pass@1 %.1f%% +- %.1f%%" % (100 * s["pass_at_k"]["1"], 100 * s["se_tasks"]))'
}

demo() {
    local out=${OUT:-runs/demo} seed=${SEED:-0} tasks=${TASKS:-4000} steps=${STEPS:-50} old
    if [ -e "$out" ]; then
        old="$out.$(date +%Y%m%d-%H%M%S)"
        mv "$out" "$old"
        say "the results that were in $out are now in $old"
    fi
    mkdir -p "$out"
    # Episodes of the built-in tasks are short: 5 turns of 40 tokens and 250 tokens in all, at most; T = 1.
    local limits="--max-turns 5 --max-turn-tokens 40 --max-tokens 250 --temperature 1 --top-p 1 --backend $BACKEND"

    stage "tasks" python gen.py builtin --n "$tasks" --seed "$seed" --split train --out "$out/tasks.jsonl"
    stage "validation tasks" python gen.py builtin --n 90 --seed "$seed" --split val --out "$out/val.jsonl"
    stage "test tasks" python gen.py builtin --n 180 --seed "$seed" --split test --out "$out/test.jsonl"
    stage "demonstrations" python rollout.py --tasks "$out/tasks.jsonl" --oracle --backend "$BACKEND" \
        --out "$out/demos.jsonl"
    stage "tokenizer and model" python builtin/tiny.py --rollouts "$out/demos.jsonl" --seed "$seed" --out "$out/tiny"
    stage "supervised fine-tuning" env OMP_NUM_THREADS=2 python sft.py \
        --model "$out/tiny" --rollouts "$out/demos.jsonl" --out "$out/sft" --seed "$seed" \
        --epochs 5 --batch-size 16 --lr 2e-3 --beta2 0.98 --micro-batch-tokens 2048 --no-gradient-checkpointing
    # shellcheck disable=SC2086
    stage "test after SFT" env OMP_NUM_THREADS=2 python eval.py run \
        --tasks "$out/test.jsonl" --model "$out/sft/last" --attempts 2 --out "$out/eval_sft.jsonl" $limits
    # One thread for the trainer and one for the sampler, which run at the same time: --lag 1.
    # shellcheck disable=SC2086
    stage "reinforcement learning" env OMP_NUM_THREADS=1 python dppo.py \
        --model "$out/sft/last" --tasks "$out/tasks.jsonl" --out "$out" --seed "$seed" \
        --prompts 16 --group-size 8 --lag 1 --max-refill 2 --steps "$steps" --lr 3e-4 --beta2 0.95 \
        --micro-batch-tokens 1024 --no-gradient-checkpointing \
        --eval-tasks "$out/val.jsonl" --eval-every 10 --eval-attempts 1 --workers 64 $limits
    # shellcheck disable=SC2086
    stage "test after RL" env OMP_NUM_THREADS=2 python eval.py run \
        --tasks "$out/test.jsonl" --model "$out/last" --attempts 2 --out "$out/eval_rl.jsonl" $limits
    stage "learning curve" python eval.py plot "$out" --out "$out/curve.png"

    printf '\n%s\nafter SFT: %s\nafter RL:  %s\ncurve:     %s\n' \
        "$TABLE" "$(pass1 "$out/eval_sft.jsonl")" "$(pass1 "$out/eval_rl.jsonl")" "$out/curve.png"
}

case "${1:-}" in
    demo) setup; demo ;;
    test) shift; setup; python -m pytest -q test_all.py "$@" ;;
    *) say "usage: bash run.sh demo | test [pytest arguments]"; exit 2 ;;
esac
