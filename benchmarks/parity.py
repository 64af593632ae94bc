"""How far the logits are from those of `transformers`, for each family and number of ranks.

    python -m benchmarks.parity [--tp 1,2,3,4] [--prompts 20]

The tiny seeded checkpoints of the tests, float32, ranks as threads. Each figure is the largest absolute difference
over all prompts, positions and vocabulary ids; the logits themselves run to a few units. Needs the `test` extra.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.reference import reference_model
from tests.model_shards.families import test_decoder, test_experts, test_gpt2
from tests.model_shards.families.logits import random_prompts, reference_logits, sharded_logits_of

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **test_decoder.VARIANTS,
    **test_experts.VARIANTS,
    **{f"gpt2, {name}": variant for name, variant in test_gpt2.VARIANTS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", default="1,2,3,4")
    parser.add_argument("--prompts", type=int, default=20)
    given = parser.parse_args()
    sizes = [int(size) for size in given.tp.split(",")]
    prompts = random_prompts(given.prompts)
    print(f"{'family':40} {'largest logit':>13}" + "".join(f"{f'TP={size}':>11}" for size in sizes))
    for name, (family, overrides) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_model(Path(folder), family, **overrides)
            reference = reference_model(path)
            expected = torch.cat([reference_logits(reference, prompt) for prompt in prompts])
            differences = [
                (sharded_logits_of(path, size, prompts) - expected).abs().max().item() for size in sizes
            ]
        figures = "".join(f"{difference:11.1e}" for difference in differences)
        print(f"{name:40} {expected.abs().max().item():13.2f}{figures}")


if __name__ == "__main__":
    main()
