#!/usr/bin/env bash
# Several hosts, played by network namespaces of one machine: a training run over all of them, in whose middle the
# Docker host's cable is out for CUT_S seconds. What is in there then ends as infra_error, and the run goes on.
#
#   sudo VLLM_PYTHON=/path/to/its/python bash extras/hosts.sh runs/demo/sft/last runs/demo/tasks.jsonl runs/hosts
#
#   trainer0  10.77.0.1  torchrun, rank 0: trains, samples, logs      trainer1  10.77.0.2  torchrun, rank 1: trains
#   sampler   10.77.0.3  vLLM on the CPU                              boxes     10.77.0.4  dockerd, for the sandboxes
#
# Each has one cable, to the bridge of a fifth namespace, the switch; nothing of it is seen from outside, and all is
# gone at the end. Flags after the three go to dppo.py. Needs root, iproute2, dockerd, and beside it an ordinary
# Docker daemon that has tmax-base:core. Real hosts need the same commands (`train`, dockerd, vLLM) and a shared
# folder for --push-dir; let only the trainers reach the ports, or give Docker TLS: there are no passwords.
set -euo pipefail -m # -m: each background job is a process group, which one signal ends
model=$(realpath "$1") tasks=$(realpath "$2") out=$(realpath -m "$3")
shift 3
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
net=tmax$$
work=$(mktemp -d /tmp/tmax-hosts.XXXXXX)
vllm=
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
on() { exec nsenter --net="/run/netns/$net-$1" "${@:2}"; } # `ip netns exec` would hide dockerd's control groups

tear_down() {
    trap '' INT TERM HUP
    set +e
    groups=$(jobs -p)
    [ -z "$vllm" ] || kill -KILL -- "-$vllm" # it would take its time, and has nothing to put away
    for group in $groups; do kill -- "-$group"; done 2>/dev/null
    for _ in {1..90}; do [ -z "$(jobs -rp)" ] || sleep 1; done # dockerd first ends its containers
    for group in $groups; do kill -KILL -- "-$group"; done 2>/dev/null
    for pid in $(pgrep -f -- "$work/"); do kill -KILL "$pid"; done # what dockerd has left, if it was killed
    for name in switch trainer0 trainer1 sampler boxes; do ip netns del "$net-$name"; done 2>/dev/null
    for mount in $(awk -v work="$work/" 'index($2, work) == 1 {print $2}' /proc/mounts); do
        umount -l "$mount" 2>/dev/null
    done
    rm -rf "$work"
    say "torn down"
}
trap tear_down EXIT
trap 'exit 1' INT TERM HUP

ip netns add "$net-switch"
ip -n "$net-switch" link add switch up type bridge
host=0
for name in trainer0 trainer1 sampler boxes; do
    host=$((host + 1))
    ip netns add "$net-$name"
    ip -n "$net-switch" link add "$name" up master switch type veth peer name eth0 netns "$net-$name"
    ip -n "$net-$name" addr add "10.77.0.$host/24" dev eth0
    for device in lo eth0; do ip -n "$net-$name" link set "$device" up; done
done

on boxes dockerd --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" --bridge=none \
    --iptables=false --host "unix://$work/docker.sock" --host tcp://10.77.0.4:2375 --tls=false \
    >"$work/dockerd.log" 2>&1 &
dockerd=$!
VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    on sampler "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$model" --host 10.77.0.3 --port 8000 \
    --dtype float32 --enforce-eager --no-enable-chunked-prefill --logprobs-mode processed_logprobs \
    --max-model-len 1024 >"$work/vllm.log" 2>&1 &
vllm=$!

answers() { # pid, log, command: waits until the host's program does
    until ("${@:3}") >/dev/null 2>&1; do
        kill -0 "$1" 2>/dev/null || { tail -20 "$2"; exit 1; }
        sleep 1
    done
}
answers $dockerd "$work/dockerd.log" docker -H "unix://$work/docker.sock" version
docker save tmax-base:core | docker -H "unix://$work/docker.sock" load -q
say "dockerd answers"
answers $vllm "$work/vllm.log" on trainer0 curl -sf http://10.77.0.3:8000/health
say "vLLM answers"

train() { # rank, flags of dppo.py
    DOCKER_HOST=tcp://10.77.0.4:2375 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 on "trainer$1" \
        "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$1" --master-addr 10.77.0.1 \
        --master-port 29500 dppo.py --model "$model" --tasks "$tasks" --out "$out" --engine http://10.77.0.3:8000 \
        --push-dir "$work/shared" --backend docker --steps 8 --lag 1 --prompts 2 --group-size 6 --workers 12 \
        --lr 1e-4 --max-turns 3 --max-turn-tokens 40 --max-tokens 300 --max-prompt-tokens 300 \
        --no-gradient-checkpointing "${@:2}"
}
train 0 "$@" &
first=$!
train 1 "$@" &
second=$!
until [ "$(cat "$out/metrics.jsonl" 2>/dev/null | wc -l)" -ge 2 ]; do
    kill -0 $first 2>/dev/null || exit 1
    sleep .1
done
say "cut: the Docker host's cable is out"
ip -n "$net-switch" link set boxes down
sleep "${CUT_S:-30}"
ip -n "$net-switch" link set boxes up
say "the cable is in again"
wait $first
wait $second
say "all steps are done"
