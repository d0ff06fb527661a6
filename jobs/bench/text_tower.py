"""Forward and backward pass of the text tower alone: texts trimmed, packed, in groups sorted by length, or padded.

    python -m jobs.bench.text_tower --captions cc12m --batch 64

The last columns are the tokens that a contender computes for a text, and their ratio to those that exist.
"""

from __future__ import annotations

from statistics import median

import torch

from jobs.bench.harness import CAPTIONS, SEED, Data, make_data, ratios, show
from jobs.bench.train import Rounds, head, step_parser, step_seconds
from pipeline.distributed.start import start_world
from pipeline.model.towers import ModelConfig, Towers, build_towers
from pipeline.model.trimming import TextChunks, text_trimming
from pipeline.training.step import micro_batches

CONTENDERS = {
    "trimmed": (1, True, False),
    "packed": (1, True, True),
    "groups_of_4": (4, True, False),
    "padded": (1, False, False),
}
"""Groups of texts, sorted by length; whether texts are cut; whether they are packed."""


def contender(towers: Towers, data: Data, *, device: torch.device, name: str) -> tuple[Rounds, float]:
    """The passes of one of `CONTENDERS`, and the tokens that it computes for a text."""
    (count, trim, packed), batch = CONTENDERS[name], len(data.text)
    trimming = text_trimming(towers.clip, wanted=None)
    assert trimming is not None, "texts of this architecture cannot be cut"
    lengths = trimming.cut(data.text)[1] if trim else None
    chunks = micro_batches(batch, -(-batch // count))

    def run(steps: int) -> None:
        for _ in range(steps):
            texts = TextChunks(data.text.to(device, non_blocking=True), chunks, lengths=lengths, packed=packed)
            for index in range(len(chunks)):
                towers.encode_text(texts.tokens(index)).sum().backward()
            towers.zero_grad()

    return run, TextChunks(data.text, chunks, lengths=lengths, packed=packed).computed_tokens / batch


def main() -> None:
    given = step_parser(__doc__, arch="ViT-B-32", batch=64, rounds=5, steps=2)
    given.add_argument("--captions", choices=CAPTIONS, default="cc12m", help="lengths as of this dataset (from memory)")
    args = given.parse_args()
    with start_world(device=args.device) as world:
        data = make_data(args)
        towers, _ = build_towers(ModelConfig(arch=args.arch, image_size=args.image_size), seed=SEED)
        towers.to(world.device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
        built = {name: contender(towers, data, device=world.device, name=name) for name in CONTENDERS}
        times = step_seconds({name: run for name, (run, _) in built.items()}, args, world.device)
        rows = {
            name: (1e3 * median(found), *ratios(times["trimmed"], found), built[name][1],
                   built[name][1] / built["packed"][1])
            for name, found in times.items()
        }  # fmt: skip
        columns = {"ms": ".1f", "trimmed /": ".2f", "lowest": ".2f", "highest": ".2f", "tokens": ".1f", "/ all": ".2f"}
        show(f"text tower of {head(args, world.device)}, {args.captions}", columns, rows, output=args.json)


if __name__ == "__main__":
    main()
