"""The in-process engine: samples with the model itself, in torch, for many episodes at once.

It needs no server, so the demo and the tests run anywhere, and it shares its arithmetic with the trainer:
with equal weights the log-probs agree to rounding. For models that matter, vLLM is much faster. rollout.py
says what an engine is. """

import atexit
import queue
import threading
import time

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rollout import Sampling, Turn, head_logits


class Row:
    """One request to the TorchEngine, and what has been sampled for it so far."""

    def __init__(self, ids, limit, seed, sampling, past):
        self.ids, self.limit, self.sampling, self.past = ids, limit, sampling, past
        # One uniform number a token: which token it picks depends on nothing else in the wave.
        self.uniform = np.random.default_rng(seed).random(limit)
        self.new, self.logprobs, self.versions = [], [], []
        self.done = threading.Event()


class TorchEngine:
    """Samples in process: requests from many threads are stepped together, with a KV cache, one wave at a
    time.

    A wave is made of the requests of similar length that wait when the last one ends: one row of 10,000
    tokens would pad all others to its length. A row that is done leaves at once, so that its command runs in
    a sandbox while the others are stepped further.

    model: this engine's own copy of the weights (see `load`). eos_ids: tokens that end a turn. """

    def __init__(self, model, eos_ids, max_batch: int = 256):
        self.model, self.max_batch = model, max_batch
        self.eos_ids = set(eos_ids)
        self.version = 0
        self.sampled_tokens, self.busy_s = 0, 0.0  # see take_speed
        self.waiting = queue.Queue()
        self.weights = threading.RLock()  # held for each forward pass, and by `load`
        self.failure, self.closing = None, False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        atexit.register(self.close)  # Python must not end while a thread is inside torch

    def close(self):
        """Ends the engine's thread; requests that still wait are not answered."""
        self.closing = True
        self.waiting.put(None)
        self.thread.join()

    def load(self, state_dict, version: int, probe=None):
        """Takes new weights between two forward passes. version: the mark of tokens sampled from now on.

        probe: for engines that have to prove it; this one's weights are simply there. """
        self.pushed_bytes = sum(w.numel() * w.element_size() for w in state_dict.values())
        with self.weights:
            self.model.load_state_dict(state_dict)
            self.version = version

    def generate(self, ids: list[int], limit: int, seed: int, sampling: Sampling, past=None) -> Turn:
        """Samples one turn after `ids`, at most `limit` tokens; blocks. The same seed gives the same turn.

        past: the episode's last `Turn.past`; its keys and values need not be computed again.
        """
        row = Row(ids, limit, seed, sampling, past)
        self.waiting.put(row)
        row.done.wait()
        if self.failure:
            raise self.failure
        cut = row.new[-1] not in self.eos_ids
        return Turn(row.new, row.logprobs, (row.versions[0], row.versions[-1]), cut, row.past)

    def take_speed(self) -> dict:
        """Seconds the engine was busy, and sampled tokens a second of them, since the last call."""
        tokens, seconds = self.sampled_tokens, self.busy_s
        self.sampled_tokens, self.busy_s = 0, 0.0
        return {"sample_s": seconds, "sample_tokens_per_s": tokens / max(seconds, 1e-9)}

    def _serve(self):
        rows = []  # requests that wait, oldest first
        while True:
            try:  # a short grace: episodes whose commands end together then share a wave
                while len(rows) < self.max_batch:
                    rows.append(self.waiting.get(timeout=0.002 if rows else None))
            except queue.Empty:
                pass
            if self.closing:
                return
            length = len(rows[0].ids)
            wave = [row for row in rows if length / 2 - 64 < len(row.ids) < length * 2 + 64]
            rows = [row for row in rows if row not in wave]
            start = time.perf_counter()
            try:
                self._run_wave(wave)
            except BaseException as e:  # the threads that wait must learn of it, or they would wait for ever
                self.failure = e
                rows = wave + rows
                while not self.closing:
                    for row in rows:
                        row.done.set()
                    rows = [self.waiting.get()]
                return
            self.busy_s += time.perf_counter() - start
            self.sampled_tokens += sum(len(row.new) for row in wave)

    def _forward(self, ids, mask, positions, cache):
        """Logits (B, V) after the last column, the extended cache, and the version of the weights."""
        with self.weights:
            out = self.model.base_model(
                ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            logits = head_logits(out.last_hidden_state[:, -1], self.model.get_output_embeddings().weight)
            return logits, out.past_key_values, self.version

    def _run_wave(self, rows: list[Row]):
        device = self.model.device
        tensor = lambda values: torch.tensor(values, device=device)  # noqa: E731
        with torch.inference_mode():
            # Prefill: what an earlier turn has computed is taken over, unless the weights are new since then,
            # and episodes that begin with the same prompt share one row.
            with self.weights:  # no new weights between the check and the forward pass
                for row in rows:
                    if row.past and row.past[0] != self.version:
                        row.past = None
                keys = [id(row) if row.past else tuple(row.ids) for row in rows]
                unique = dict(zip(keys, rows))
                pasts = [row.past for row in unique.values()]
                cache, past_mask = join_pasts(pasts, self.model)  # mask (P, past)
                fresh = [row.ids[row.past[1] if row.past else 0 :] for row in unique.values()]
                width = max(map(len, fresh))
                ids = tensor([[0] * (width - len(new)) + new for new in fresh])  # (P, T), left-padded
                mask = tensor([m + [0] * (width - len(new)) + [1] * len(new)
                               for m, new in zip(past_mask, fresh)])
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
                logits, cache, version = self._forward(ids, mask, positions, cache)
            place = {key: i for i, key in enumerate(unique)}
            index = tensor([place[key] for key in keys])  # from one row a prompt to one row a request
            cache.reorder_cache(index)
            logits, mask, positions = logits[index], mask[index], positions[index]

            # Decode: one token for every row that is not done. Rows that are done ride along until it pays to
            # move the others together.
            live = list(range(len(rows)))
            while True:
                tokens, logprobs = sample(logits[live], [rows[i] for i in live])
                for i, token, logprob in zip(live, tokens, logprobs):
                    row = rows[i]
                    row.new.append(token)
                    row.logprobs.append(logprob)
                    row.versions.append(version)
                    if token in self.eos_ids or len(row.new) == row.limit:
                        row.past = cut_past(cache, i, mask[i], row.versions[0])
                        row.done.set()
                live = [i for i in live if not rows[i].done.is_set()]
                if not live or self.closing:
                    return
                if len(live) < 0.75 * len(rows):
                    index, rows = tensor(live), [rows[i] for i in live]
                    cache.reorder_cache(index)
                    mask, positions, live = mask[index], positions[index], list(range(len(rows)))
                ids = tensor([[row.new[-1]] for row in rows])  # (B, 1)
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                positions = positions[:, -1:] + 1
                logits, cache, version = self._forward(ids, mask, positions, cache)


def sample(logits, rows: list[Row]) -> tuple[list[int], list[float]]:
    """One token a row by inverting the distribution function at the row's own uniform number.

    logits: (B, V) fp32. Returns token ids and their log-probs, both under the row's temperature and before
    top-p (which the trainer does not model: RL samples with top_p 1). """
    temperature = torch.tensor([[r.sampling.temperature or 1.0] for r in rows], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    probs = logprobs.exp().double()  # double: at 150,000 tokens an fp32 cumulative sum loses the tail
    top_p = torch.tensor([[r.sampling.top_p] for r in rows], device=logits.device, dtype=torch.double)
    if (top_p < 1).any():
        ordered, order = probs.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0  # keeps the token that crosses top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    u = torch.tensor([[r.uniform[len(r.new)]] for r in rows], device=logits.device, dtype=torch.double)
    total = probs.cumsum(-1)
    picked = torch.searchsorted(total, u * total[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    greedy = torch.tensor([[r.sampling.temperature == 0] for r in rows], device=logits.device)
    picked = torch.where(greedy, logits.argmax(-1, keepdim=True), picked)
    return picked[:, 0].tolist(), logprobs.gather(-1, picked)[:, 0].tolist()


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache that leaves room, so that a new token does not copy all before it."""

    room = None

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        old = self.get_seq_length()
        new = old + keys.shape[2]
        if self.room is None or self.room[0].shape[2] < new:
            b, heads, _, d = keys.shape
            self.room = [keys.new_empty(b, heads, new + 32, d), values.new_empty(b, heads, new + 32, d)]
            if old:
                self.room[0][:, :, :old], self.room[1][:, :, :old] = self.keys, self.values
        self.room[0][:, :, old:new], self.room[1][:, :, old:new] = keys, values
        self.keys, self.values = (states[:, :, :new] for states in self.room)
        return self.keys, self.values

    def reorder_cache(self, index):
        super().reorder_cache(index)  # makes new tensors, without room
        self.room = None


def cut_past(cache, i: int, mask, version: int) -> tuple | None:
    """Row i of a cache without its padding: (version, tokens, [(keys, values) a layer], each (heads, tokens,
    d)).

    None for models with layers that keep a running state (linear attention): there is nothing to cut there.
    """
    if any(type(layer) is not RoomyLayer for layer in cache.layers):
        return None
    columns = mask.nonzero()[:, 0]
    layers = [(layer.keys[i][:, columns], layer.values[i][:, columns]) for layer in cache.layers]
    return version, len(columns), layers


def join_pasts(pasts: list[tuple | None], model):
    """A wave's cache from its rows' pasts (None: nothing yet), left-padded; and its mask, 0 and 1."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    lengths = [past[1] if past else 0 for past in pasts]
    width = max(lengths)
    if width:
        some = next(past for past in pasts if past)[2]
        for i, layer in enumerate(cache.layers):
            heads, _, d = some[i][0].shape
            states = [some[i][0].new_zeros(len(pasts), heads, width, d) for _ in ("keys", "values")]
            for row, past in enumerate(pasts):
                if past:
                    states[0][row, :, width - past[1] :], states[1][row, :, width - past[1] :] = past[2][i]
            layer.update(*states)
    return cache, [[0] * (width - length) + [1] * length for length in lengths]
