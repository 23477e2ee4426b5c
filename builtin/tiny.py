"""The demo's model as a checkpoint: a Qwen3 of 0.65 M parameters and its tokenizer, made from demonstrations.

    python builtin/tiny.py --rollouts demos.jsonl --out tiny

An ordinary folder comes out, which transformers and vLLM load; nothing else in the project knows that it is
special. Three choices let so small a model learn from scratch in minutes on two CPU cores:

- One word, one token. An agent copies: the file name in the instruction goes into the command. A word never
  carries its leading space, so it has the same id in a sentence, in a path and in an output.
  Digits are single.
- What never varies is one token: the system block, the frame of a tool call, the submission. The model has no
  English to learn from them, and an episode is some 60 tokens long instead of 500.
- Mimetic initialisation: in every layer W_k = W_q and W_o = transpose of W_v. Attention then looks at equal
  tokens and passes on what it finds, which is most of copying; from the usual random start that takes far
  longer to appear.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rollout  # noqa: E402
from records import read_jsonl  # noqa: E402

# Qwen's ChatML with tools, without the parts a tiny model does not use (thinking, several system messages).
TEMPLATE = """\
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nFunctions you may call, as JSON schemas:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nA call is a JSON object within tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[1:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set arguments = call.function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WORD = re.compile(r"[A-Za-z]{2,}")
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def make_tokenizer(rollouts: list[dict], vocab_size: int):
    """A byte-level BPE tokenizer of at most vocab_size tokens:
    any text goes through it, frequent words whole. """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[A-Za-z_]+|[0-9]|\s|[^A-Za-z_0-9\s]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(CONTROL), special_tokens=CONTROL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # the bytes alone; the words follow, without the stumps of BPE's merges
    bpe.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    # the units that hold control tokens are special: outputs cannot spell them
    for unit in constant_units(tokenizer):
        tokenizer.add_tokens([AddedToken(unit, normalized=False, special="<|im_" in unit)])
    counts = Counter(
        word for r in rollouts for text in variable_texts(r["messages"]) for word in WORD.findall(text)
    )
    words = [word for word, n in counts.most_common(vocab_size - len(tokenizer)) if n > 2]
    tokenizer.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in words])
    return tokenizer


def variable_texts(messages: list[dict]):
    """The parts of a conversation that differ from task to task: instruction, commands, outputs."""
    for message in messages[1:]:
        for call in message.get("tool_calls", []):
            yield json.loads(call["function"]["arguments"])["command"]
        if message["content"]:
            yield message["content"]


def constant_units(tokenizer) -> list[str]:
    """The stretches of text that are the same in every episode."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": rollout.SYSTEM}, {"role": "user", "content": "\0"}],
        tools=[rollout.TOOL], add_generation_prompt=True, tokenize=False,
    )
    before, after = prompt.split("\0")
    call_before, call_after = rollout.format_call("\0", "hermes").replace("\\u0000", "\0").split("\0")
    return [
        before, after, call_before, call_after, rollout.SUBMIT,
        "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "\n[exit code 0]", "\n[exit code 1]", "(no output)",
    ]


def make_model(tokenizer, seed: int):
    """A Qwen3 of 0.65 M parameters with mimetic initialisation."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=320,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
            layer.self_attn.o_proj.weight.copy_(layer.self_attn.v_proj.weight.T)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", required=True,
                        help="rollouts.jsonl whose words the tokenizer must know")
    parser.add_argument("--out", required=True, help="checkpoint folder")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rollouts = read_jsonl(args.rollouts)
    if not rollouts:
        sys.exit(f"tiny.py: {args.rollouts} has no rollouts")
    tokenizer = make_tokenizer(rollouts, args.vocab_size)
    model = make_model(tokenizer, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
