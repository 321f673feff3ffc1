"""The torch-free vocabulary: what a tensor, a layer and a model are to become, and what a model family looks like."""
