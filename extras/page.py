"""The page of `eval.py show`: extras/show.html with the episodes inside, one file that needs no network.

Everything in an episode is untrusted: a model wrote it. It enters the page as gzipped JSON in base64, whose
alphabet has no "<" and no quote, in script elements of a type that no browser runs; the page unpacks an
episode when it is opened and makes text nodes of it, never markup. A content security policy allows the
page's own script and style, by their hashes, and nothing else: no other script, no image, no request.
"""

import base64
import gzip
import hashlib
import json
import math
import os
import re
from pathlib import Path

import rollout
from records import numbered_records

LISTED = ("task_id", "reward", "end", "turns", "step", "sample", "attempt", "advantage", "model")
ONLY_OPENED = ("group", "seed", "error", "grade_log", "times", "token_ids", "loss_mask", "kept")
LOGPROBS = ("logprobs", "trainer_logprobs")


def write_page(source: str, path: str, tokenizer_folder: str | None = None) -> str:
    """Writes the page of a rollouts or eval file; returns a line about it.
    ValueError if there is none to show.

    Tokens are shaded where a tokenizer says what they are: that of `tokenizer_folder`, or of the records'
    model. Of a long training run take the last episodes: tail -n 2000 rollouts.jsonl > last.jsonl. """
    template = Path(__file__).with_name("show.html").read_text(encoding="utf-8")
    for kind in ("script", "style"):  # the policy names the template's own two elements by their hashes
        code = re.search(rf"(?s)<{kind}>(.*?)</{kind}>", template)[1]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        template = template.replace(f"{{{kind} hash}}", f"sha256-{digest}")
    head, tail = template.split("<!-- episodes -->")
    index, texts, tokenizer = [], {}, None
    part = Path(f"{path}.part")
    try:
        with open(part, "w", encoding="utf-8") as page:
            page.write(head)
            for number, record in numbered_records(source):
                if not isinstance(record.get("messages"), list):
                    raise ValueError(f"{source}:{number} has no messages to show")
                folder = tokenizer_folder or str(record.get("model"))
                if record.get("token_ids") and not tokenizer and os.path.isdir(folder):
                    from transformers import AutoTokenizer

                    tokenizer = AutoTokenizer.from_pretrained(folder)
                episode = {name: record.get(name) for name in ONLY_OPENED}
                episode["messages"] = [shown_message(m) for m in record["messages"] if isinstance(m, dict)]
                for name in LOGPROBS:
                    episode[name] = [round(p, 4) if isinstance(p, (int, float)) else None
                                     for p in record.get(name) or []]
                if tokenizer and record.get("token_ids"):
                    episode["pieces"] = token_texts(tokenizer, record["token_ids"], texts)
                page.write(element(f"episode-{len(index)}", episode))
                index.append([record.get(name) for name in LISTED])
            if not index:
                raise ValueError(f"{source} has no episodes")
            listed = {"source": os.path.basename(source), "fields": LISTED, "episodes": index, "texts": texts}
            page.write(element("index", listed))
            page.write(tail)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    size = os.path.getsize(path) / 1e6
    shading = "" if texts else "; tokens are not shown: --model FOLDER names their tokenizer"
    return f"{path}: {len(index)} episodes, {size:.1f} MB{shading}"


def element(id: str, value) -> str:
    """A value as an element that no browser runs: JSON, gzipped, in base64.
    NaN and infinities become null. """

    def finite(x):
        if isinstance(x, dict):
            return {k: finite(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    data = json.dumps(finite(value), separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{id}">{packed}</script>\n'


def shown_message(message: dict) -> dict:
    """A message as the page shows it: role, text, and of an assistant's turn its thinking and its calls.

    The calls are read by the harness's own parser, so that the page shows what was run. """
    text = message.get("content") or ""
    text = text if isinstance(text, str) else json.dumps(text)
    shown = {"role": str(message.get("role")), "text": text}
    if shown["role"] != "assistant":
        return shown
    tool_format = "qwen3_xml" if "<function=" in text else "hermes"
    calls = rollout.parse_calls(text, tool_format)
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        calls.append(rollout.check_call(function.get("name"), function.get("arguments")))
    thinking, closed, said = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        thinking, said = text, ""
    thinking = message.get("reasoning_content") or thinking.strip().removeprefix("<think>")
    return shown | {"text": said.partition("<tool_call>")[0].strip(), "thinking": thinking.strip(),
                    "calls": [call._asdict() for call in calls]}


def token_texts(tokenizer, ids: list[int], texts: dict[int, str]) -> dict[int, str]:
    """Adds the text of each new id to `texts`; returns {position: text} where that is not the token's share.

    One lookup a token of the vocabulary, not of the episode. A character whose bytes are split over tokens is
    decoded from all of them: its last token shows it, the others show nothing. """

    def decode(some):
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    split, pieces = [], {}
    for position, id in enumerate(ids):
        if id not in texts:
            texts[id] = decode([id])
        if "\ufffd" not in texts[id]:
            split = []
            continue
        split.append(position)
        whole = decode([ids[i] for i in split])
        if "\ufffd" not in whole:
            pieces |= {i: "" for i in split} | {position: whole}
            split = []
        elif len(split) == 4:  # no character is longer: its first byte begins none
            split = split[1:]
    return pieces
