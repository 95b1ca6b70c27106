"""Data: readers (sources), packed uint8 store, per-sample augmentation on the batch, loader, splits."""
