"""Both rollout engines on the same weights, prompts and sampled lengths, in turns, in one process.

OMP_NUM_THREADS=1 python tests/bench_rollout.py            needs vllm; a minute for each size on a laptop
"""

import os
import pathlib
import statistics
import sys
import time

import torch
import tyro
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import common  # noqa: E402
import ppo_loop  # noqa: E402

# of Qwen2: features, and in the MLP, layers, vocabulary; heads have 64 features
SIZES = {"10m": (320, 896, 8, 512), "100m": (768, 2304, 12, 8192), "1b": (2048, 5632, 22, 32000)}


def bench(size: tuple[str, ...] = ("10m", "100m"), rows: int = 64, new: int = 64, rounds: int = 3):
    """Prints tokens made a second of both engines, and vLLM's over transformers'.

    Args:
        size: of the model: 10m, 100m, 1b
        rows: prompts at once, of 8 to 64 tokens
        new: tokens made for each
        rounds: in turns, of which the median counts
    """
    device = common.setup_distributed()
    threads = torch.get_num_threads()
    print(f"{device}, {threads} threads, {rows} prompts of 8 to 64 tokens, {new} new ones each")
    for name in size:
        width, inner, layers, vocab_size = SIZES[name]
        fields = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
        fields |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 64)
        fields |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
        config = Qwen2Config(**fields, vocab_size=vocab_size, max_position_embeddings=2048)
        run = ppo_loop.parse(["--rollout", "vllm", "--rollout-batch-size", str(rows)])
        empty = dict.fromkeys(ppo_loop.Task._fields)
        task = ppo_loop.Task(**{**empty, "model_config": config, "stop_ids": [], "longest": 64 + new})
        kinds = {"transformers": ppo_loop.HFRollout, "vllm": ppo_loop.VLLMRollout}
        engines = {engine_name: kind(run, task, device) for engine_name, kind in kinds.items()}
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        count = sum(p.numel() for p in lm.parameters())
        print(f"\n{name}: {count / 1e6:.1f} million parameters, {engines['vllm'].dtype}")
        for engine_name, engine in engines.items():
            start = time.perf_counter()
            engine.sync((n, p.detach().to(device, engine.dtype)) for n, p in lm.named_parameters())
            print(f"  {engine_name:13s} sync {time.perf_counter() - start:.3f} s")
        lengths = torch.randint(8, 65, (rows,)).tolist()
        prompts = [torch.randint(config.vocab_size, (n,)).tolist() for n in lengths]
        seen = {engine_name: [] for engine_name in engines}
        for turn in range(rounds + 1):  # the first warms up
            for engine_name, engine in engines.items():
                asked = [(ids, turn * rows + i, new) for i, ids in enumerate(prompts)]
                wall = time.perf_counter()
                cpu = time.process_time()
                out = engine.generate(asked, 1.0)
                spent = time.perf_counter() - wall, time.process_time() - cpu
                assert sum(len(ids) for ids, _, _ in out) == rows * new
                seen[engine_name] += [spent] if turn else []
        rates = {}
        for engine_name, spent in seen.items():
            rates[engine_name] = [rows * new / statistics.median(column) for column in zip(*spent)]
            by_wall, by_cpu = rates[engine_name]
            print(f"  {engine_name:13s} {by_wall:8,.0f} tokens a second, {by_cpu:8,.0f} a second of CPU time")
        ratios = [a / b for a, b in zip(rates["vllm"], rates["transformers"])]
        print(f"  vllm / transformers: {ratios[0]:.2f} by wall time, {ratios[1]:.2f} by CPU time")


if __name__ == "__main__":
    tyro.cli(bench)
    sys.stdout.flush()
    os._exit(0)  # as common.launch ends: vLLM would destroy the process group
