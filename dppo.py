"""Reinforcement learning on outcomes: a checkpoint and tasks.jsonl in, a better checkpoint out.

Every step takes groups of episodes of the same task, gives each episode its reward minus its group's mean as
advantage, and makes the tokens of the better episodes more likely and those of the worse ones less. Sampling
runs ahead of training (`--lag`), so tokens come from a policy a little older than the one that learns from
them; DPPO's mask cuts the tokens whose probability has already moved too far.

    python dppo.py --model ckpt --tasks tasks.jsonl --out runs/rl                       # one process
    torchrun --nproc-per-node 2 dppo.py --model ckpt --tasks tasks.jsonl --out runs/rl  # sharded with FSDP2
    python dppo.py ... --engine http://host:8000,http://host:8001                       # vLLM servers sample
    python dppo.py ... --resume                                                         # goes on after a stop

It writes metrics.jsonl (a line a step), rollouts.jsonl (every trained episode with both sides' log-probs) and
checkpoints that transformers and vLLM load. To read it, start at `train` near the end: it is the whole loop.

Left out: a KL penalty and a value network (the recipe has neither), packing of sequences, sequence
parallelism. """

import argparse
import atexit
import copy
import os
import queue
import re
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)

import rollout
from builtin.engine import TorchEngine
from builtin.servers import PushError, VllmEngine
from records import JsonlWriter
from sandbox import InfraError, resolve_backend

# ------------------------------------------------------------------------------------------------------------
# 1. The maths
# ------------------------------------------------------------------------------------------------------------


def group_advantages(rewards, mode: str = "centered") -> torch.Tensor:
    """Advantages of one group's episodes: (G,) rewards -> (G,) fp32.

    centered: reward - group mean (RECIPE section 3). normalized: that over the group's standard deviation, as
    in GRPO. A group without spread gives zeros. """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if not has_spread(rewards):
        return torch.zeros(len(rewards))
    advantages = rewards - rewards.mean()
    if mode == "normalized":
        advantages = advantages / rewards.std(correction=0)
    elif mode != "centered":
        raise ValueError(f"advantage mode {mode!r}: use centered or normalized")
    return advantages.float()


def has_spread(rewards) -> bool:
    """Whether a group teaches anything: rewards that differ by more than float noise."""
    return max(rewards) - min(rewards) > 1e-6


def dppo_keep(logprobs, old_logprobs, advantages, delta: float = 0.1) -> torch.Tensor:
    """DPPO's mask with the binary approximation of total variation (RECIPE section 3): True where a token is
    kept.

    logprobs: log pi, the trainer's now. old_logprobs: log mu, the sampler's then. advantages: broadcastable
    to both. A token is cut when its probability has moved by more than delta and the update would move it
    further the same way. A ratio as in PPO would cut rare tokens that barely moved and keep likely ones that
    moved a lot. """
    moved = logprobs.exp() - old_logprobs.exp()  # pi - mu; |pi - mu| is the binary TV divergence
    further = ((advantages > 0) & (moved > 0)) | ((advantages < 0) & (moved < 0))
    return ~((moved.abs() > delta) & further)


def grpo_keep(logprobs, old_logprobs, advantages, low: float = 0.2, high: float = 0.272) -> torch.Tensor:
    """The tokens that PPO's clipping leaves a gradient: ratio in [1 - low, 1 + high], or going back."""
    ratio = (logprobs - old_logprobs).exp()
    return ~(((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low)))


def policy_loss(logprobs, old_logprobs, advantages, mask, total, loss: str = "dppo", delta: float = 0.1):
    """The loss of a part of a batch, and which of its tokens were kept.

    logprobs (B, T) with gradient, old_logprobs (B, T), advantages (B, 1) or (B, T), mask (B, T) True where
    sampled. total: the number of sampled tokens in the WHOLE batch, over all micro-batches and ranks, cut
    tokens included: the parts' losses then add up to the batch's mean over tokens, however it is split.

    dppo, grpo and reinforce differ only in the tokens they keep. A kept token's term is A * pi / mu, whose
    gradient is A * pi / mu * grad log pi: the policy gradient, corrected for the policy that sampled. """
    with torch.no_grad():
        if loss == "dppo":
            keep = mask & dppo_keep(logprobs, old_logprobs, advantages, delta)
        elif loss == "grpo":
            keep = mask & grpo_keep(logprobs, old_logprobs, advantages)
        elif loss == "reinforce":
            keep = mask.clone()
        else:
            raise ValueError(f"loss {loss!r}: use dppo, grpo or reinforce")
    # Tokens that are not kept get ratio 1 before the product: a huge ratio times zero would be NaN.
    ratio = torch.where(keep, logprobs - old_logprobs, 0.0).exp()
    return -(ratio * advantages * keep).sum() / total, keep


class HeadLogprobs(torch.autograd.Function):
    """Log-probs (N,) of target tokens under the LM head, and entropies (N,), both fp32;
    never a matrix (N, V).

    Both directions go `chunk` positions at a time, and backward computes each chunk's logits again. One such
    matrix of a long batch is larger than all else together, and plain autograd keeps four. Entropies carry no
    gradient. """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):  # (N, d), (V, d), (N,)
        norms, logprobs, entropies = [], [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk)):
            logits = rollout.head_logits(h, weight).div_(temperature)  # (n, V)
            norm = logits.logsumexp(-1)  # (n,)
            norms.append(norm)
            logprobs.append(logits.gather(-1, t[:, None])[:, 0] - norm)
            probs = (logits - norm[:, None]).exp_()
            entropies.append(norm - torch.linalg.vecdot(probs, logits))
        norms, logprobs, entropies = map(torch.cat, (norms, logprobs, entropies))
        ctx.save_for_backward(hidden, weight, targets, norms)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, norms = ctx.saved_tensors
        hidden_grad, weight_grad = [], torch.zeros_like(weight, dtype=grad.dtype)
        parts = (x.split(ctx.chunk) for x in (hidden, targets, norms[:, None], grad[:, None] / ctx.temperature))
        for h, t, norm, g in zip(*parts):
            logits = rollout.head_logits(h, weight).div_(ctx.temperature)
            logits_grad = logits.sub_(norm).exp_().mul_(-g)  # -g * p
            logits_grad.scatter_add_(-1, t[:, None], g)  # + g at the target
            logits_grad = logits_grad.to(weight.dtype)
            hidden_grad.append(logits_grad @ weight)
            if weight.dtype == weight_grad.dtype:
                weight_grad.addmm_(logits_grad.T, h)  # without a second (V, d)
            else:  # bf16: its products are summed in fp32
                weight_grad += logits_grad.T @ h
            del logits, logits_grad  # before there are the next ones
        return torch.cat(hidden_grad), weight_grad.to(weight.dtype), None, None, None


def token_logprobs(model, ids, loss_mask, temperature: float = 1.0, chunk: int = 512):
    """Log-probs of the tokens that carry loss, and the entropy at their positions: both (B, T) fp32, 0
    elsewhere.

    ids, loss_mask: (B, T), right-padded. logprobs[b, t] = log p(ids[b, t] | ids[b, :t]) under the temperature
    the tokens were sampled with. No attention mask is needed: a causal model never looks at the padding on
    the right. Only positions that carry loss go through the LM head. """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, d)
    loss_mask = loss_mask.bool().clone()
    loss_mask[:, 0] = False  # nothing predicts the first token
    hidden = hidden[:, :-1][loss_mask[:, 1:]]  # (N, d): the position before each such token
    weight = model.get_output_embeddings().weight
    logprobs, entropies = HeadLogprobs.apply(hidden, weight, ids[loss_mask], temperature, chunk)  # (N,)
    empty = torch.zeros(ids.shape, dtype=logprobs.dtype, device=ids.device)
    return empty.masked_scatter(loss_mask, logprobs), empty.masked_scatter(loss_mask, entropies)


# ------------------------------------------------------------------------------------------------------------
# 2. Batches: lists of samples -> equal numbers of padded micro-batches on every rank
# ------------------------------------------------------------------------------------------------------------


def micro_batches(samples: list[dict], max_tokens: int, ranks: int = 1) -> list[list[list[dict]]]:
    """Splits samples (each with "ids") into micro-batches: for each rank a list of the same length.

    Rows of similar length share one, so that little is padding, and rows * longest row stays within
    max_tokens (one longer row gets one for itself). Ranks get about the same number of tokens. A rank that
    has fewer gets empty micro-batches: FSDP ranks must run the same number of passes, or they wait for each
    other for ever. """
    batches = []
    for sample in sorted(samples, key=lambda s: -len(s["ids"])):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]["ids"]) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    shares = [[] for _ in range(ranks)]
    for batch in batches:  # longest first, always to the rank that has least: within a batch of even
        min(shares, key=lambda share: sum(len(s["ids"]) for b in share for s in b)).append(batch)
    count = max(map(len, shares))
    return [share + [[]] * (count - len(share)) for share in shares]


def pad(rows: list[list], value, dtype, device) -> torch.Tensor:
    """Right-pads rows to one tensor (B, T)."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=dtype, device=device)


class Policy(torch.nn.Module):
    """The model with `token_logprobs` as its forward, so that FSDP gathers the head's weights for it too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return token_logprobs(self.model, *inputs)


def backward(policy, batches: list[list[dict]], loss_function, temperature: float = 1.0):
    """Gradients of one optimiser step: forward and backward over this rank's micro-batches, one after the
    other.

    loss_function(logprobs, entropies, mask, batch) -> the micro-batch's share of the loss, so that all
    shares, over micro-batches and ranks, add up to the loss of the whole batch. """
    device = next(policy.parameters()).device
    world = dist.get_world_size() if dist.is_initialized() else 1
    for batch in batches:
        rows = batch or [{"ids": [0, 0], "mask": [0, 1]}]  # a dummy: runs like any other, weighs nothing
        ids = pad([s["ids"] for s in rows], 0, torch.long, device)  # (B, T)
        mask = pad([s["mask"] for s in rows], 0, torch.bool, device)
        logprobs, entropies = policy(ids, mask, temperature)
        loss = loss_function(logprobs, entropies, mask, batch) if batch else logprobs.sum() * 0.0
        (loss * world).backward()  # FSDP averages gradients over ranks, where we need their sum


# ------------------------------------------------------------------------------------------------------------
# 3. Ranks: plain torch.distributed, FSDP2 for the shards
# ------------------------------------------------------------------------------------------------------------


def setup_ranks() -> tuple[int, int, torch.device]:
    """Joins the process group that torchrun describes; returns rank, world size, device.

    A single CPU process joins none: that would cost a third of its speed and shard nothing.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not cuda:
        return 0, 1, device
    if "RANK" not in os.environ:
        raise ValueError("on a GPU, start with torchrun, also for one: torchrun --nproc-per-node 1 ...")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout is for ranks that wait while rank 0 waits for rollouts. They wait in gloo, which times out
    # softly.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=24))
    return dist.get_rank(), dist.get_world_size(), device


def leave_ranks():
    """All together: a rank that leaves while another one still works is aborted now and then."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def shard(model) -> Policy:
    """Wraps the model. With a process group, every rank keeps a slice of each layer (FSDP2).

    Master weights and gradient sums are fp32; the computation is bf16 on CUDA and fp32 on the CPU.
    """
    policy = Policy(model)
    if dist.is_initialized():
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        cuda = next(model.parameters()).is_cuda
        dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
        for layer in model.base_model.layers:
            fully_shard(layer, mp_policy=dtypes)
        fully_shard(policy, mp_policy=dtypes)
    return policy


def offload_activations(model):
    """Keeps what the layers save for backward in the CPU's memory: with gradient checkpointing their inputs,
    2 * d bytes a layer and token in bf16. A copy that is made after this would run the original's layers."""
    forward = model.base_model.forward

    def offloaded(*args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    model.base_model.forward = offloaded


def full_weights(policy) -> dict[str, torch.Tensor]:
    """The whole model's weights on rank 0's CPU, gathered one by one. Every rank must call it."""
    weights = {}
    for name, w in policy.model.state_dict().items():
        w = w.full_tensor() if hasattr(w, "full_tensor") else w
        weights[name] = w.cpu() if is_first() else None
    return weights


def is_first() -> bool:
    """Whether this is rank 0, which samples, logs and saves."""
    return not dist.is_initialized() or dist.get_rank() == 0


def clip_gradients(policy, max_norm: float) -> float:
    """Scales the gradients to a norm of at most max_norm, over all ranks; returns the norm they had."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def scatter(per_rank: list | None):
    """Gives each rank its element of rank 0's list."""
    if not dist.is_initialized():
        return per_rank[0]
    mine = [None]
    dist.scatter_object_list(mine, per_rank, src=0)
    return mine[0]


def gather(mine) -> list | None:
    """Rank 0 gets the list of what every rank has; the others get None."""
    if not dist.is_initialized():
        return [mine]
    everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones, dst=0)
    return everyones


def save_checkpoint(policy, tokenizer, folder: Path, optimizer=None, state: dict | None = None):
    """Writes a folder that transformers and vLLM load, whole or not at all. Every rank must call it.

    With an optimizer, its trainer.pt holds that one's state and rank 0's `state`:
    all that --resume needs. """
    weights = full_weights(policy)
    if optimizer:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0
        moments = get_optimizer_state_dict(policy, optimizer, options=whole)
    if not is_first():
        return
    temporary = folder.with_name(folder.name + ".tmp")  # a killed run leaves this name, which nothing reads
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        policy.model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        if optimizer:
            torch.save({**state, "optimizer": moments}, temporary / "trainer.pt")
    except Exception as e:  # each of the three libraries has its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{folder} could not be written ({e}); the checkpoints before it are whole") from e
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def checkpoints(out: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    found = [path for path in out.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def keep_checkpoints(out: Path, keep: int, improved: bool):
    """Points `last`, and `best` if it is that, to the newest checkpoint; removes all older than the newest
    `keep` but the best."""
    found = checkpoints(out)
    for name in ["last"] + ["best"] * improved:
        (out / "link.tmp").unlink(missing_ok=True)
        (out / "link.tmp").symlink_to(found[-1].name)
        os.replace(out / "link.tmp", out / name)
    for path in found[:-keep]:
        if path != (out / "best").resolve():
            shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------------------
# 4. Rollouts that run ahead of the trainer (rank 0)
# ------------------------------------------------------------------------------------------------------------


class Rollouts:
    """Plays groups of episodes in threads and keeps the useful ones ready for the trainer.

    Every group that has been started and not yet been trained on, or dropped, counts; at most (lag + 1) *
    prompts do. This bounds how old a group can be when it is used, without throwing finished work away. Only
    a straggler that newer groups overtook may turn out too old: it is dropped, and counted as stale.

    play(task, group, sample) -> Rollout record. state: what `trained` returned when a run was stopped. """

    def __init__(self, tasks: list[dict], play, args, state: dict | None = None):
        self.tasks, self.play, self.args = tasks, play, args
        self.bound = (args.lag + 1) * args.prompts  # groups that may be under way
        self.changed = threading.Condition()  # guards everything below
        self.started = 0  # groups ever started
        self.playing = {}  # group number -> its finished episodes so far
        self.ready = []  # useful groups, in the order they were finished
        self.in_training = 0  # groups handed out by next_batch and not yet reported as trained
        self.failure = None
        self._reset_counts()
        self.jobs = queue.Queue()
        if state:  # groups that were in flight are played again
            for group in state["unfinished"]:
                self._start(group)
            self.started = state["started"]
        for _ in range(args.workers):
            threading.Thread(target=self._work, daemon=True).start()

    def _reset_counts(self):
        self.dropped_rewards, self.last_error = [], None
        names = "groups_zero groups_one groups_flat groups_failed groups_stale stale_tokens infra_errors"
        self.seen = dict.fromkeys(names.split(), 0)

    def _dropped(self) -> int:
        """Groups that were for nothing. All that were under way may fail at once, when the sandboxes' host is
        lost: that alone must not end the run."""
        failed = max(0, self.seen["groups_failed"] - self.bound)
        return failed + sum(self.seen[name] for name in ("groups_zero", "groups_one", "groups_flat"))

    def _admit(self):
        """Starts groups up to the bound; none any more when too many were dropped since the last batch."""
        while (
            len(self.playing) + len(self.ready) + self.in_training < self.bound
            and self._dropped() <= self.args.max_refill * self.args.prompts
        ):
            self._start(self.started)
            self.started += 1

    def _start(self, group: int):
        """Queues a group's episodes. Its number says which task it plays: every epoch is a shuffle of all."""
        epoch, position = divmod(group, len(self.tasks))
        order = np.random.default_rng([self.args.seed, epoch]).permutation(len(self.tasks))
        self.playing[group] = []
        for sample in range(self.args.group_size):
            self.jobs.put((self.tasks[order[position]], group, sample))

    def _work(self):
        while True:
            job = self.jobs.get()
            try:
                record = self.play(*job)
                with self.changed:
                    self._finish(record)
            except BaseException as e:  # whatever it is, the trainer must raise it and not wait for ever
                with self.changed:
                    self.failure = e
            with self.changed:
                self.changed.notify_all()

    def _finish(self, record: dict):
        """Takes an episode in; the last one of a group decides whether the group is useful."""
        group = self.playing[record["group"]]
        group.append(record)
        if len(group) < self.args.group_size:
            return
        del self.playing[record["group"]]
        graded = sorted((r for r in group if r["reward"] is not None), key=lambda r: r["sample"])
        rewards = [r["reward"] for r in graded]
        for failed in (r for r in group if r["reward"] is None):  # says nothing about the policy
            self.seen["infra_errors"] += 1
            self.last_error = failed["error"]
        if len(graded) < 2:
            self.seen["groups_failed"] += 1
        elif has_spread(rewards):
            self.ready.append(graded)
        else:
            kind = "zero" if rewards[0] < 1e-6 else "one" if rewards[0] > 1 - 1e-6 else "flat"
            self.seen["groups_" + kind] += 1
            self.dropped_rewards.append(rewards[0])
        self._admit()

    def next_batch(self, version: int) -> tuple[list[list[dict]], dict]:
        """The next `prompts` useful groups, none more than `lag` versions old, and what was counted since the
        last.

        Groups without spread in reward are dropped and replaced (active sampling), at most max_refill *
        prompts of them. After that the batch is smaller, with a warning; if nothing at all is useful, an
        error says why. """
        prompts = self.args.prompts
        with self.changed:
            while True:
                self._admit()
                self.changed.wait_for(lambda: self.failure or len(self.ready) >= prompts or not self.playing)
                if self.failure:
                    raise self.failure
                stale = [g for g in self.ready if version - oldest_version(g) > self.args.lag]
                self.ready = [g for g in self.ready if version - oldest_version(g) <= self.args.lag]
                self.seen["groups_stale"] += len(stale)
                self.seen["stale_tokens"] += sum(len(r["token_ids"]) for group in stale for r in group)
                if len(self.ready) >= prompts or not (stale or self.playing):
                    break
            groups, self.ready = self.ready[:prompts], self.ready[prompts:]
            groups.sort(key=lambda group: group[0]["group"])  # sums do not depend on which was done first
            rewards = self.dropped_rewards + [np.mean([r["reward"] for r in group]) for group in groups]
            counts = {**self.seen, "groups_kept": len(groups), "reward": float(np.mean(rewards or [0]))}
            if not rewards:
                raise InfraError(f"no episode could be played: {self.last_error}")
            if not groups:
                raise ValueError(
                    f"none of {self._dropped()} groups has a spread in reward, so there is nothing to learn: "
                    f"in {counts['groups_zero']} every episode failed, in {counts['groups_one']} every one "
                    "succeeded. Use tasks that the model solves sometimes, a better warm start, or a larger "
                    "--group-size" + (f". Besides, {counts['infra_errors']} episodes had no outcome, "
                                      f"the last: {self.last_error}" if self.last_error else "")
                )
            if len(groups) < prompts:
                print(f"warning: {self._dropped()} groups dropped, {len(groups)} of {prompts} are useful")
            if self.last_error:
                print(f"warning: {counts['infra_errors']} episodes without outcome, e.g.: {self.last_error}")
            self.in_training = len(groups)
            self._reset_counts()
            self._admit()
        return groups, counts

    def trained(self, more: bool = True) -> dict:
        """The last batch has become weights, and the engine has them. more: another step follows.

        Returns where sampling stands, for a checkpoint: {"started", "unfinished": [group numbers]}. """
        with self.changed:
            self.in_training = 0
            unfinished = sorted([*self.playing, *(group[0]["group"] for group in self.ready)])
            state = {"started": self.started, "unfinished": unfinished}
            if more:
                self._admit()
        return state


def oldest_version(group: list[dict]) -> int:
    """The policy version of a group's first token."""
    return min(r["policy_versions"][0][0] for r in group)


# ------------------------------------------------------------------------------------------------------------
# 5. The loop
# ------------------------------------------------------------------------------------------------------------


PROBE = "Go through the files in /app, count the lines of each with wc -l, and write the sum to total.txt."


def push_weights(policy, engine, version: int, probe: list[int]):
    """Gives the sampler the trainer's weights. Every rank must call it.

    The in-process engine copies them between two forward passes. vLLM's servers read them from a folder, and
    must then give the trainer's own log-probs of the probe, or PushError ends the run. Episodes in
    flight go on with the new weights. """
    weights = full_weights(policy)
    ids = torch.tensor([probe], device=next(policy.parameters()).device)  # (1, T)
    with torch.no_grad():  # on every rank, as each layer's shards are gathered for it
        logprobs = policy(ids, torch.ones_like(ids))[0][0, 1:].tolist()
    if is_first():
        engine.load(weights, version, (probe, logprobs))


def train(args):
    rank, world, device = setup_ranks()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.deterministic)
    out, chat, sampling = Path(args.out), rollout.Chat(args.model), rollout.sampling_from(args)
    saved = checkpoints(out)[-1:] if args.resume else []
    state = torch.load(saved[0] / "trainer.pt", mmap=True) if saved else {"step": 0, "best": -1.0}
    model = rollout.load_model(saved[0] if saved else args.model, device=device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    # Rank 0 samples: an engine with its own copy of the weights, and threads that play ahead.
    if rank == 0:
        backend, tasks = resolve_backend(args.backend), rollout.load_checked_tasks(args.tasks)
        eval_tasks = rollout.load_checked_tasks(args.eval_tasks) if args.eval_tasks else []
        order = {"seed": args.seed, "prompts": args.prompts, "group-size": args.group_size,
                 "tasks": rollout.derive_seed(*(t["id"] for t in tasks))}
        open_folder(out, args.resume, args.steps, state, order)
        ends = rollout.end_ids(model.generation_config, chat)
        if args.engine == "torch":
            copied = copy.deepcopy(model).eval()
            copied.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
            engine = TorchEngine(copied, ends, 1 if args.deterministic else args.max_batch)
        else:
            push_dir = Path(args.push_dir or out, f"tmax-{rollout.derive_seed(str(out.resolve()))}")
            atexit.register(shutil.rmtree, push_dir, ignore_errors=True)
            engine = VllmEngine(args.engine.split(","), args.model, chat, ends, sampling, push_dir,
                                args.abort_in_flight, args.nccl)

        def play(task, group, sample, seed=None, grade="submitted"):
            seed = rollout.derive_seed(args.seed, group) if seed is None else seed
            record = rollout.run_episode(task, engine, chat, sampling, seed=seed, group=group, sample=sample,
                                         model=args.model, backend=backend, grade=grade)
            if args.binary and record["reward"] is not None:
                record["reward"] = float(record["reward"] >= 1)
            return record

    if args.offload_activations:
        offload_activations(model)
    policy = shard(model.train())
    betas = (args.beta1, args.beta2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=betas, weight_decay=0.0)
    if saved:
        set_optimizer_state_dict(policy, optimizer, state.pop("optimizer"),
                                 options=StateDictOptions(full_state_dict=True))
        torch.set_rng_state(state["rng"])
    best = state["best"]

    # Nothing is sampled before the engine has the policy, also after a resume.
    roles = {"system": rollout.SYSTEM, "user": PROBE}
    probe = chat.prompt_ids([{"role": role, "content": text} for role, text in roles.items()])
    push_weights(policy, engine if rank == 0 else None, state["step"], probe)
    if rank == 0:
        rollouts = Rollouts(tasks, play, args, state.get("rollouts"))
        metrics_file, rollouts_file = JsonlWriter(out / "metrics.jsonl"), JsonlWriter(out / "rollouts.jsonl")

    for step in range(state["step"], args.steps):
        last = step + 1 == args.steps
        # Sample. Threads have been playing while the last step trained; wait until enough groups are useful.
        clock = [time.perf_counter()]
        shares = None
        if rank == 0:
            groups, metrics = rollouts.next_batch(version=step)
            samples = make_samples(groups, args.advantage)
            total = sum(sum(s["mask"]) for s in samples)
            shares = [(batches, total) for batches in micro_batches(samples, args.micro_batch_tokens, world)]
        batches, total = scatter(shares)
        clock.append(time.perf_counter())

        # Train. One optimiser step on the whole batch, a mean over all of its sampled tokens.
        def loss_function(logprobs, entropies, mask, batch):
            old_logprobs = pad([s["old_logprobs"] for s in batch], 0.0, torch.float32, device)
            advantages = torch.tensor([[s["advantage"]] for s in batch], device=device)
            loss, keep = policy_loss(logprobs, old_logprobs, advantages, mask, total, args.loss, args.delta)
            for i, s in enumerate(batch):  # for the log
                s["logprobs"], s["entropy"] = logprobs[i].tolist(), entropies[i].sum().item()
                s["kept"] = keep[i].tolist()
            return loss

        backward(policy, batches, loss_function, args.temperature)
        grad_norm = clip_gradients(policy, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.perf_counter())

        # Push. Episodes in flight go on with the new weights.
        push_weights(policy, engine if rank == 0 else None, step + 1, probe)
        if rank == 0:
            sampled = rollouts.trained(more=not last)
        clock.append(time.perf_counter())

        # Log: one line of numbers a step, and every trained episode with both sides' log-probs.
        everyones = gather([s for batch in batches for s in batch])
        if rank == 0:
            trained = sorted((s for share in everyones for s in share), key=lambda s: s["index"])
            metrics |= {"step": step, "grad_norm": grad_norm, "lr": args.lr}
            metrics |= batch_metrics(groups, trained, chat)
            metrics["lag"] = step - min(oldest_version(g) for g in groups)
            metrics |= dict(zip(["wait_s", "train_s", "push_s"], np.diff(clock).tolist()))
            metrics["train_tokens_per_s"] = metrics["tokens"] / metrics["train_s"]
            metrics["push_gb_per_s"] = 1e-9 * engine.pushed_bytes / metrics["push_s"]
            metrics |= engine.take_speed()
            metrics["sampler_idle_s"] = max(0.0, clock[-1] - clock[0] - metrics["sample_s"])
            write_rollouts(rollouts_file, groups, trained, step)

        # Evaluate and save, now and then and at the end.
        improved = False
        if args.eval_tasks and (last or (step + 1) % args.eval_every == 0):
            if rank == 0:
                metrics["eval_pass1"] = evaluate(eval_tasks, play, args)
                best, improved = max(best, metrics["eval_pass1"]), metrics["eval_pass1"] > best
            improved = scatter([improved] * world)
        if rank == 0:
            metrics_file.write(metrics)
            print(step_line(metrics, args.steps), flush=True)
        if last or improved or (step + 1) % args.save_every == 0:
            if rank == 0:
                state = {"step": step + 1, "best": best, "rng": torch.get_rng_state(), "order": order,
                         "rollouts": sampled, "files": {name: os.path.getsize(out / name)
                                                        for name in ("metrics.jsonl", "rollouts.jsonl")}}
            save_checkpoint(policy, chat.tokenizer, out / f"step-{step + 1}", optimizer, state)
            if rank == 0:
                keep_checkpoints(out, args.keep, improved)
    leave_ranks()


def refuse_used_folder(out: Path, way_out: str = ""):
    """Makes the folder of a run; ValueError if a run has written there already."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "metrics.jsonl").exists():
        raise ValueError(f"{out} already holds a run; choose another --out{way_out}")


def open_folder(out: Path, resume: bool, steps: int, state: dict, order: dict):
    """Makes the folder of a new run, or takes what a stopped one wrote after its checkpoint out of its files:
    those steps are done again."""
    if not resume:
        return refuse_used_folder(out, ", or go on with it by --resume")
    out.mkdir(parents=True, exist_ok=True)
    if state["step"] >= steps:
        raise ValueError(f"{out} has {state['step']} steps already; raise --steps to go on")
    for name, value in state.get("order", {}).items():
        if value != order[name]:
            raise ValueError(f"--{name} is not what {out} was started with; --resume needs the same")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        if (out / name).exists():
            os.truncate(out / name, state.get("files", {}).get(name, 0))


def make_samples(groups: list[list[dict]], mode: str) -> list[dict]:
    """What a rank needs of each episode: its tokens, the sampler's log-probs and its advantage."""
    samples = []
    for group in groups:
        for record, advantage in zip(group, group_advantages([r["reward"] for r in group], mode).tolist()):
            samples.append({
                "index": len(samples), "ids": record["token_ids"], "mask": record["loss_mask"],
                "old_logprobs": [p or 0.0 for p in record["logprobs"]], "advantage": advantage,
            })
    return samples


def evaluate(tasks: list[dict], play, args) -> float:
    """pass@1 on held-out tasks: the share of reward 1 among the attempts that have an outcome."""
    jobs = [(task, i, attempt) for i, task in enumerate(tasks) for attempt in range(args.eval_attempts)]
    records = rollout.run_jobs(jobs, lambda job: play(*job, seed=args.seed, grade="always"), args.workers)
    return float(np.mean([r["reward"] >= 1 for r in records if r["reward"] is not None] or [0]))


def batch_metrics(groups: list[list[dict]], samples: list[dict], chat) -> dict:
    """The numbers of one step: samples are those of make_samples, with what the loss function added."""
    records = [r for group in groups for r in group]
    flat = {  # one entry a sampled token
        name: np.concatenate([np.array(s[name])[: len(s["ids"])][np.array(s["mask"], bool)] for s in samples])
        for name in ("logprobs", "old_logprobs", "kept")
    }
    advantage = np.concatenate([np.full(sum(s["mask"]), s["advantage"]) for s in samples])
    moved = flat["logprobs"] - flat["old_logprobs"]
    kept = flat["kept"].astype(bool)
    turns = sum(r["turns"] for r in records)
    calls = [m["content"][m["content"].find("<tool_call>"):] for r in records for m in r["messages"]
             if m["role"] == "assistant" and "<tool_call>" in m["content"]]
    return {
        "episodes": len(records),
        "tokens": sum(len(s["ids"]) for s in samples),
        "sampled_tokens": len(kept),
        "turns": turns / len(records),
        "tokens_per_turn": len(kept) / turns,
        "tokens_per_call": float(np.mean([len(chat.encode(c)) for c in calls] or [0])),
        "loss": float(-(np.exp(moved) * advantage)[kept].sum() / len(kept)),
        "kept_positive": float(kept[advantage > 0].mean()),
        "kept_negative": float(kept[advantage < 0].mean()),
        "logprob_diff_max": float(np.abs(moved).max()),
        "logprob_diff_mean": float(np.abs(moved).mean()),
        "entropy": sum(s["entropy"] for s in samples) / len(kept),
    }


def write_rollouts(writer: JsonlWriter, groups: list[list[dict]], samples: list[dict], step: int):
    """The trained episodes, with the trainer's side of them: its log-probs, what was kept, the advantage."""
    for record, s in zip((r for group in groups for r in group), samples):
        trainer_logprobs = [round(p, 5) if m else None for p, m in zip(s["logprobs"], s["mask"])]
        kept = [bool(k) if m else None for k, m in zip(s["kept"], s["mask"])]
        writer.write({**record, "step": step, "advantage": s["advantage"],
                      "trainer_logprobs": trainer_logprobs, "kept": kept})


def step_line(m: dict, steps: int) -> str:
    """One line a step for the terminal."""
    line = (
        f"step {m['step'] + 1}/{steps}  reward {m['reward']:.3f}  groups {m['groups_kept']} kept "
        f"{m['groups_zero']} zero {m['groups_one']} one  lag {m['lag']}  turns {m['turns']:.2f}  "
        f"entropy {m['entropy']:.3f}  "
        f"diff {m['logprob_diff_max']:.2f}  mask +{m['kept_positive']:.3f} -{m['kept_negative']:.3f}  "
        f"wait {m['wait_s']:.1f}s  train {m['train_s']:.1f}s"
    )
    return line + (f"  eval pass@1 {m['eval_pass1']:.3f}" if "eval_pass1" in m else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # what
    parser.add_argument("--model", required=True, help="checkpoint folder to start from")
    parser.add_argument("--tasks", required=True, help="tasks.jsonl")
    parser.add_argument("--out", required=True, help="folder for metrics, rollouts and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --out's newest checkpoint, if any")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="bit for bit the same again; slow")
    # sampler
    parser.add_argument("--engine", default="torch", help="torch, or http://HOST:PORT[,...] of vLLM servers")
    parser.add_argument("--max-batch", type=int, default=256, help="sequences torch steps together")
    parser.add_argument("--push-dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None,
                        help="folder through which weights go to vLLM; servers elsewhere need a shared one")
    parser.add_argument("--nccl", action="store_true",
                        help="weights go to vLLM from rank 0's GPU instead (not yet run on a GPU)")
    parser.add_argument("--abort-in-flight", action="store_true",
                        help="a push makes vLLM start turns in flight again, instead of going on with them")
    # rollouts (Table 13)
    parser.add_argument("--prompts", type=int, default=8, help="useful groups a step")
    parser.add_argument("--group-size", type=int, default=32, help="episodes a group")
    parser.add_argument("--lag", type=int, default=4, help="steps sampling may run ahead; 0: on-policy")
    parser.add_argument("--max-refill", type=int, default=8, help="batches of dropped groups, at most")
    parser.add_argument("--workers", type=int, default=128, help="episodes at the same time")
    parser.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    parser.add_argument("--binary", action="store_true", help="a graded reward below 1 counts as 0")
    rollout.add_sampling_flags(parser)
    # objective
    parser.add_argument("--loss", default="dppo", choices=["dppo", "grpo", "reinforce"])
    parser.add_argument("--delta", type=float, default=0.1, help="DPPO: probability a token may move")
    parser.add_argument("--advantage", default="centered", choices=["centered", "normalized"])
    # optimisation
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--micro-batch-tokens", type=int, default=65_536 + 2_048, help="padded tokens a pass")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--offload-activations", action="store_true",
                        help="layers' inputs wait for backward in the CPU's memory: longer episodes fit")
    # evaluation and checkpoints
    parser.add_argument("--eval-tasks", help="held-out tasks.jsonl; the best checkpoint by pass@1 is kept")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--eval-attempts", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--keep", type=int, default=3, help="newest checkpoints; the best stays too")
    args = parser.parse_args()
    try:
        if args.group_size < 2:
            raise ValueError("--group-size: at least 2, as an advantage is a reward minus its group's mean")
        if args.deterministic and (args.engine != "torch" or args.lag):
            raise ValueError("--deterministic needs --engine torch and --lag 0: else timing decides")
        if args.nccl and not torch.cuda.is_available():
            raise ValueError("--nccl needs a GPU; without one the weights go through --push-dir")
        if args.keep < 1:
            raise ValueError("--keep: at least 1, the newest checkpoint")
        train(args)
    except KeyboardInterrupt:
        sys.exit(f"dppo.py: stopped; metrics and checkpoints so far are in {args.out}")
    except (InfraError, PushError, ValueError, OSError) as e:
        sys.exit(f"dppo.py: {e}")


if __name__ == "__main__":
    main()
