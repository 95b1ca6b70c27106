"""A small ResNet, written as anyone would write it, trained block-locally on the built-in digits.

No gradient leaves a stage: ``bicovg.localize`` gives each its own goodness, readout and loss, and ``local_step``
trains them one after the other. Run it with ``python examples/local_resnet_digits.py``; it takes under a minute on a
laptop. ``--epochs`` and ``--scope end-to-end`` are there to compare.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bicovg
from bicovg.data.digits import SPLIT_SEED, TEST_SHARE, load_digits
from bicovg.data.store_holdout import stratified_holdout
from bicovg.fusion import mean_logits, top_k_accuracy


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def small_resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Residual(16, 16),
        Residual(16, 32, stride=2),
        Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load_split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then test images and labels."""
    pixels, labels = load_digits()
    train, test = stratified_holdout(labels, TEST_SHARE, SPLIT_SEED)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    images = (images - images[train].mean()) / images[train].std()
    targets = torch.from_numpy(labels)
    return images[train], targets[train], images[test], targets[test]


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--scope", default="strict")
    args = parser.parse_args(words)
    torch.manual_seed(0)
    net = bicovg.localize(small_resnet(), num_classes=10, scope=args.scope, image_shape=(1, 8, 8))
    print(net.report())
    images, labels, test_images, test_labels = load_split()
    optimizers = [torch.optim.AdamW(unit.parameters(), lr=2e-3) for unit in net.units]
    for epoch in range(args.epochs):
        for batch in torch.randperm(len(images)).split(64):
            losses = bicovg.local_step(net, optimizers, images[batch], labels[batch])
        print(f"epoch {epoch + 1}: last losses {', '.join(f'{loss:.3f}' for loss in losses)}")
    with torch.no_grad():
        logits = net.eval()(test_images)
    for index, exit_ in enumerate(logits):
        print(f"stage {net.exits[index]}: {top_k_accuracy(exit_, test_labels):.2f} %")
    accuracy = top_k_accuracy(mean_logits(logits), test_labels)
    print(f"mean of all: {accuracy:.2f} %")
    return accuracy


if __name__ == "__main__":
    main()
