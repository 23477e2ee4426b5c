"""The engine `http://...`: vLLM servers, which sample for the episodes and take a trainer's weights."""

import base64
import contextlib
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import requests

from backends.common import socket_options
from rollout import SYSTEM, TOOL, Chat, Sampling, Turn
from sandbox import InfraError


class PushError(Exception):
    """A sampler did not take the trainer's weights: the run must stop, whatever it would sample is stale."""


class Server:
    """What the VllmEngine knows about one vLLM server."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.lock = threading.Lock()  # held while the server gets weights; requests wait for it
        self.version = 0  # policy version of its weights
        self.label = "default"  # the same as vLLM says it: "default" until weights are pushed
        self.scores = self.expected = None  # log-probs of the last push's probe: its own, the trainer's
        self.lost = False  # it failed, and may have been restarted with other weights since
        self.avoid_until = 0.0  # new episodes go elsewhere until then
        self.in_flight = self.episodes = 0


class Watched(requests.adapters.HTTPAdapter):
    """Connections that end when their host is silent for SILENT_S (backends/common.py), however long an
    answer takes."""

    def init_poolmanager(self, *args, **more):
        super().init_poolmanager(*args, socket_options=socket_options(), **more)


class VllmEngine:
    """vLLM servers: token ids in, token ids and log-probs out.

    An episode stays on one server, for its prefix cache; a new one goes to the server with the fewest
    requests. A server that fails is tried again with growing pauses, some three minutes in all; then its
    episodes end as infra_error, while the others go on. `load` pushes weights; without it the servers sample
    with what they were started with.

    Facts about vLLM 0.32 that this relies on, all of them tried: every sampling parameter is sent, as what a
    request leaves out comes from the model's generation_config; log-probs are those of the distribution that
    was sampled from only with --logprobs-mode processed_logprobs; a server keeps a label for its weights, and
    a restarted one has lost ours; reloading, labels and /server_info need VLLM_SERVER_DEV_MODE=1. """

    pauses_s = (1, 2, 4, 8, 16, 32, 60, 60)  # between tries: a restart takes a minute or two

    def __init__(self, urls: list[str], model: str, chat: Chat, ends: list[int], sampling: Sampling,
                 push_dir: Path | None = None, abort: bool = False, nccl: bool = False):
        self.model, self.chat, self.ends, self.sampling = model, chat, ends, sampling
        self.push_dir = push_dir  # where `load` leaves weights for the servers, under the same path there
        self.nccl = nccl  # whether `load` broadcasts them instead
        self.abort = abort  # whether `load` aborts the turns in flight, which then start again
        self.servers = [Server(url) for url in urls]
        self.lock = threading.Lock()  # guards the counts
        self.requests = self.sampled_tokens = 0  # see take_speed
        self.busy_s = self.busy_since = 0.0
        self.pushed, self.pushed_bytes = None, 0  # the last `load`: version, label, probe
        for server in self.servers:
            self._check(server)

    def generate(self, ids: list[int], limit: int, seed: int, sampling: Sampling, past=None) -> Turn:
        """Samples one turn after `ids`, at most `limit` tokens; blocks. InfraError if no server can.

        past: the episode's last `Turn.past`, here its server. Versions are those of the server's weights when
        the request was sent and when its answer had come. """
        with self.lock:
            server = past or min(self.servers, key=lambda s: (time.monotonic() < s.avoid_until, s.in_flight,
                                                              s.episodes))
            server.episodes += past is None
        body = {
            "model": self.served, "prompt": ids, "add_special_tokens": False, "max_tokens": limit,
            "seed": seed, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0,
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": self.ends, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }
        pauses = iter(self.pauses_s)
        while True:
            try:
                with server.lock:
                    if server.lost:
                        self._recover(server)
                    first = server.version
                with self._counted(server):
                    choice = self._call(server, "/v1/completions", body, timeout=3600)["choices"][0]
                last = server.version
                if self._label(server) != server.label:
                    with server.lock:  # if that was because of a push, it has ended now
                        if self._label(server) != server.label:
                            raise requests.ConnectionError("it was restarted, and sampled with old weights")
                if choice["finish_reason"] != "abort":  # aborted by a push: again, with the new weights
                    break
            except requests.RequestException as e:
                if e.response is None or e.response.status_code >= 500:
                    self._lose(server, e)
                    if pause_s := next(pauses, None):
                        time.sleep(pause_s)
                        continue
                raise InfraError(f"{server.url}: {reason_of(e)}") from e
        new, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        cut = new[-1] not in self.ends
        if cut and len(new) < limit:
            raise InfraError(f"{server.url} stopped a turn by itself after {len(new)} of {limit} tokens; "
                             "start it with --generation-config vllm")
        with self.lock:
            self.sampled_tokens += len(new)
        return Turn(new, logprobs, (first, last), cut, server)

    def load(self, state_dict: dict, version: int, probe: tuple[list[int], list[float]]):
        """Gives every server new weights; PushError if one does not have them then.

        probe: token ids, and the trainer's log-probs of all but the first. A server that does not answer gets
        the weights when it is back, before it samples again. """
        from safetensors.torch import save_file

        # The head by its own name also where it is tied: vLLM on CPU else keeps a packed copy of the old one.
        seen, tensors = set(), {}
        for name, w in state_dict.items():
            w = w.detach().to("cpu", self.dtype).contiguous()
            tensors[name] = w.clone() if w.data_ptr() in seen else w
            seen.add(w.data_ptr())
        self.pushed_bytes = size = sum(w.numel() * w.element_size() for w in tensors.values())
        if not self.nccl:
            self.push_dir.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.push_dir).free) < size + 2**20:
                raise OSError(f"--push-dir: {self.push_dir} has "
                              f"{free >> 20} MB free for {size >> 20} MB of weights")
            save_file(tensors, self.push_dir / "new", metadata={"format": "pt"})
        with contextlib.ExitStack() as held:
            for server in self.servers:
                held.enter_context(server.lock)
            if not self.nccl:
                os.replace(self.push_dir / "new", self.push_dir / "model.safetensors")
            self.pushed = version, f"{os.getpid()}-{time.time_ns()}-{version}", probe
            self.tensors = tensors if self.nccl else None
            for pause_s in (*self.pauses_s, None):
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    failures = [e for e in pool.map(self._try_push, self.servers) if e]
                if len(failures) < len(self.servers):
                    return
                if pause_s is None:
                    raise InfraError(f"no vLLM server can take the weights: {failures[0]}")
                time.sleep(pause_s)

    def _try_push(self, server: Server) -> str | None:
        """Pushes; returns why the server could not be reached."""
        try:
            self._push(server)
        except requests.RequestException as e:
            self._lose(server, e)
            return f"{server.url}: {reason_of(e)}"

    def _push(self, server: Server):
        """Gives one server the weights of the last `load`, and has it prove it. Its lock must be held."""
        version, label, (ids, expected) = self.pushed
        try:
            # Turns in flight are frozen, not lost; their keys and values are computed again afterwards, with
            # the new weights.
            self._call(server, "/update_weight_version", {"new_version": f"{label}, loading"})
            self._call(server, f"/pause?mode={'abort' if self.abort else 'keep'}", {})
            if self.nccl:
                self._broadcast(server)
            else:
                where = {"weights_path": str(self.push_dir.resolve())}
                self._call(server, "/collective_rpc", {"method": "reload_weights", "kwargs": where})
            if not self._call(server, "/reset_prefix_cache?reset_running_requests=true", {})["success"]:
                raise PushError(f"{server.url} did not drop the keys and values of the old weights")
            self._call(server, "/update_weight_version", {"new_version": label})
            self._call(server, "/resume", {})
            scores = self._score(server, ids)
        except requests.HTTPError as e:
            raise PushError(f"version {version} did not reach {server.url}, which {reason_of(e)}") from e
        error = np.abs(np.subtract(scores, expected))
        off = error.max() > 1e-3 if server.fp32 else error.mean() > 0.1
        # Small steps move log-probs less than bf16 rounds: but not even a bit is no push at all.
        if server.scores and np.abs(np.subtract(server.expected, expected)).max() > 1e-3:
            off |= scores == server.scores
        if off or not np.isfinite(error).all():
            raise PushError(
                f"{server.url} does not have the weights of version {version}: its log-probs of the probe "
                f"differ from the trainer's by {error.max():.2g} at most, {error.mean():.2g} in the mean"
            )
        server.version, server.label, server.scores, server.expected = version, label, scores, expected
        self._found(server)

    def _broadcast(self, server: Server):
        """Sends a paused server the weights from this GPU, by vLLM's own transfer API. Not yet run on a GPU.

        Each push opens a communicator of its own, half a second's work: so a server that was restarted since
        the last one is no special case. Both sides must enter it together, hence the thread. """
        import torch
        from torch.cuda import nccl

        def ask(path, body):
            asked = pool.submit(self._call, server, path, body)
            if wait([asked], 2).done:  # refused; NCCL would wait for the other side for ever
                asked.result()
            return asked

        device, unique_id, weights = torch.device("cuda"), nccl.unique_id(), self.tensors
        ranks = 1 + self._call(server, "/get_world_size")["world_size"]
        with ThreadPoolExecutor(1) as pool:
            joined = ask("/init_weight_transfer_engine", {"init_info": {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1,
                "world_size": ranks}})
            comms = [nccl.init_rank(ranks, unique_id, 0)]
            nccl.all_reduce([torch.zeros(1, device=device)], comms=comms)  # the server's side begins with one
            joined.result()
            self._call(server, "/start_weight_update", {})
            sent = ask("/update_weights", {"update_info": {
                "names": list(weights), "shapes": [list(w.shape) for w in weights.values()],
                "dtype_names": [str(w.dtype).removeprefix("torch.") for w in weights.values()]}})
            for w in weights.values():
                nccl.broadcast([w.to(device)], comms=comms)
            sent.result()
        self._call(server, "/finish_weight_update", {})
        self._call(server, "/shutdown_weight_transfer_engine", {})

    def _score(self, server: Server, ids: list[int]) -> list[float]:
        """The server's log-probs of all ids but the first."""
        body = {"model": self.served, "prompt": ids, "add_special_tokens": False, "max_tokens": 1,
                "temperature": 1.0, "top_p": 1.0, "top_k": 0, "prompt_logprobs": 0}
        scores = self._call(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [score[str(i)]["logprob"] for i, score in zip(ids[1:], scores[1:])]

    def take_speed(self) -> dict:
        """Seconds in which any request was in flight, and sampled tokens a second, since the last call."""
        with self.lock:
            now = time.perf_counter()
            seconds = self.busy_s + (now - self.busy_since if self.requests else 0.0)
            tokens, self.sampled_tokens = self.sampled_tokens, 0
            self.busy_s, self.busy_since = 0.0, now
        return {"sample_s": seconds, "sample_tokens_per_s": tokens / max(seconds, 1e-9)}

    @contextlib.contextmanager
    def _counted(self, server: Server):
        """Counts one request in flight, for the choice of a server and for take_speed."""
        with self.lock:
            self.busy_since = self.busy_since if self.requests else time.perf_counter()
            self.requests += 1
            server.in_flight += 1
        try:
            yield
        finally:
            with self.lock:
                self.requests -= 1
                server.in_flight -= 1
                self.busy_s += 0.0 if self.requests else time.perf_counter() - self.busy_since

    def _call(self, server: Server, path: str, body: dict | None = None, timeout: float = 600) -> dict:
        """GET, or POST of a JSON body; a requests.RequestException if it fails.

        A connection each: vLLM closes idle ones after 5 s, which would look like a server that is gone. """
        method = "GET" if body is None else "POST"
        with requests.Session() as session:
            session.mount(server.url, Watched())
            reply = session.request(method, server.url + path, json=body, timeout=(10, timeout))
        if not reply.ok:
            said = " ".join(reply.text[:300].split())
            raise requests.HTTPError(f"answered {path} with {reply.status_code}: {said}", response=reply)
        return reply.json()

    def _label(self, server: Server) -> str:
        return self._call(server, "/weight_info")["weight_version"]

    def _recover(self, server: Server):
        """Looks whether a lost server is back; gives it the weights that it lost with a restart or missed."""
        newest = self.pushed[1] if self.pushed else server.label
        if not self._label(server) == server.label == newest:
            if not self.pushed:
                raise InfraError(f"{server.url}: another run has given it weights meanwhile")
            self._push(server)
        self._found(server)

    def _found(self, server: Server):
        if server.lost:
            print(f"{server.url} is back", flush=True)
        server.lost, server.avoid_until = False, 0.0

    def _lose(self, server: Server, error: Exception):
        """Notes a failure: new episodes avoid the server for a minute. The first one is said."""
        if not server.lost:
            print(f"warning: {server.url}: {reason_of(error)}; it is tried again"
                  + ("" if len(self.servers) == 1 else ", and new episodes go to the others"), flush=True)
        server.lost, server.avoid_until = True, time.monotonic() + 60

    def _check(self, server: Server):
        """Holds a server against this run's model, tokenizer and limits; ValueError names what differs."""
        import torch

        text = f"{SYSTEM}\n{json.dumps(TOOL)} \u00e9\u4e16 0123  x\t{self.chat.decode([self.chat.end_id, 0])}"
        try:
            models = self._call(server, "/v1/models")["data"]
            config = self._call(server, "/server_info?config_format=json")["vllm_config"]["model_config"]
            server.label = self._label(server)
            tokens = self._call(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        except requests.HTTPError as e:
            raise ValueError(f"{server.url} {reason_of(e)}; it must be vLLM 0.32, started with "
                             "VLLM_SERVER_DEV_MODE=1 in its environment") from e
        except (requests.RequestException, LookupError, TypeError) as e:
            raise InfraError(f"{server.url} is no vLLM server that answers ({reason_of(e)}); start one "
                             "there, or name in --engine where it runs") from e
        mine, wrong = os.path.realpath(self.model), []
        same = [m["id"] for m in models if m["id"] == self.model or os.path.realpath(m["root"]) == mine]
        if not same:
            wrong.append(f"it serves {models[0]['id']}, not {self.model} (if that is the same model, "
                         f"start it with --served-model-name {self.model})")
        need, has = self.sampling.max_prompt_tokens + self.sampling.max_tokens, config["max_model_len"]
        if has < need:
            wrong.append(f"its context holds {has} tokens, an episode needs {need}: start it with "
                         f"--max-model-len {need}, or lower --max-tokens")
        if config["logprobs_mode"] != "processed_logprobs":
            wrong.append(f"its log-probs are {config['logprobs_mode']}: start it with --logprobs-mode "
                         "processed_logprobs")
        if tokens != self.chat.encode(text):
            wrong.append("its tokenizer gives other ids than the model's")
        if wrong:
            raise ValueError(f"{server.url} does not fit: " + "; ".join(wrong))
        self.served, self.dtype = same[0], getattr(torch, config["dtype"].removeprefix("torch."))
        server.fp32 = self.dtype == torch.float32
        if not server.fp32 and "head_dtype" not in str(config["hf_overrides"]):
            print(f"warning: {server.url} rounds its logits to {config['dtype']}; start it with "
                  """--hf-overrides '{"head_dtype": "float32"}'""", flush=True)


def reason_of(error: Exception) -> str:
    """A failed request in a few words: what the server answered, or how it did not."""
    return str(error) if isinstance(error, requests.HTTPError) or not error.args or isinstance(
        error.args[0], str) else type(error).__name__
