"""Asks a critic that vLLM serves for the values of a response.

    vllm serve out/my/hf --runner pooling --dtype float32
    python tests/tools/ask_vllm.py

What vLLM says of a token is read from the state after it, so the value of a response token, which
is the one before it, stands one place earlier. Give ids that are made as here: vLLM reads some
stored tokenizers by other rules, and a text gets no end of the response. Without a server,
LLM("out/my/hf", runner="pooling", dtype="float32") gives the same by
encode({"prompt_token_ids": ids}, pooling_task="token_classify").
"""

import json
import urllib.request

from transformers import PreTrainedTokenizerFast

MODEL = "out/my/hf"
URL = "http://localhost:8000/pooling"


def values(prompt, response):
    """One for each token of the response, with its end."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    before = tokenizer.encode(prompt)
    ids = [*before, *tokenizer.encode(response), tokenizer.eos_token_id]
    body = json.dumps({"model": MODEL, "task": "token_classify", "input": ids}).encode()
    asked = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    [row] = json.load(urllib.request.urlopen(asked))["data"]
    return [value for [value] in row["data"][len(before) - 1 : -1]]


if __name__ == "__main__":
    print(values("94+48=", "94"))
