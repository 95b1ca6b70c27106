"""The model card of an export: what it is, how well it does, how to use it; every number from the run's summary."""

from typing import Any

from bicovg.config import Config
from bicovg.display import combined_rows
from bicovg.records import reproduce

BP_FREE = {
    "strict": "Every block was trained by its own loss alone: no gradient crossed a block (BP-free).",
    "grouped": "Gradients crossed blocks inside a group, and no further.",
    "hgb": "Gradients crossed the blocks of one unit, and no further.",
    "end-to-end": "The network was trained end to end by backpropagation.",
}


def model_card(
    name: str, config: Config, summary: dict[str, Any], head: str, exits: list[int], checks: dict[str, Any]
) -> str:
    """Markdown with the header that model hubs read."""
    data = config.data
    rows = "\n".join(f"| {label} | {r['top1']:.2f} | {r['top5']:.2f} |" for label, r in combined_rows(summary))
    command = reproduce(config) or "a recipe of its own, see `config.json`"
    found = checks["largest_difference"]
    agreement = "".join(
        f"- `{file}` agrees with PyTorch to {found[kind]:.1e} on {checks['images']} images, batch 1 and 64.\n"
        for kind, file in (("torch", "model.pt2"), ("onnx", "model.onnx"))
        if kind in found
    )
    shape = f"(batch, {data.image_channels}, {data.image_size}, {data.image_size})"
    return f"""---
library_name: bicovg
pipeline_tag: image-classification
tags: [image-classification, forward-forward, local-learning]
---
# {name}

A convolutional network for {data.name} ({data.num_classes} classes), trained with BiCovG, scope `{config.model.scope}`.
{BP_FREE.get(config.model.scope, "")}

Head: `{head}`, from block{"s" if len(exits) > 1 else ""} {", ".join(map(str, exits))}.

## Use
```python
import bicovg

model = bicovg.load("{name}")   # the path of this folder
logits = model(images)          # float images {shape} in [0, 1]
print(model.classes[logits[0].argmax()])
```
{agreement}
## Accuracy on test images, %
Run: recipe `{config.recipe}`, seed {config.seed}, {config.train.epochs} epochs.

| prediction | top-1 | top-5 |
|---|---|---|
{rows}

The best block "test-chosen" was chosen on the test images themselves and flatters itself.

## Reproduce
`{command}`
"""
