"""A small ViG learns to read 8×8 images of handwritten digits: train, look at the graph, predict.

Run this file from the root of a checkout with `.venv/bin/python -m examples.digits`, or cell by
cell, as a notebook, in an editor that knows `# %%`.
"""

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import vigpipe
from vigpipe.cli import main
from vigpipe.data.sources import open_source

folder = Path(tempfile.mkdtemp()) / "digits"

# %% [markdown]
# ## Train
#
# Every command of vigpipe is also a function: `main` takes the words that stand behind `vigpipe` on
# the command line and returns the exit code. Three epochs in this one process take less than a
# minute. With `--stages 2` or `--dp 2`, the same call would start the ranks for you.

# %%
code = main(["train", "--epochs", "3", "--out", str(folder)])
assert code == 0

# %% [markdown]
# ## Load the trained model
#
# The run has left its weights as a safetensors file. The model is an ordinary PyTorch module.

# %%
model = vigpipe.create_model(
    "vig_digits", num_classes=10, in_chans=1, checkpoint_path=folder / "model.safetensors"
).eval()
digits = open_source("digits")
images = digits.test.read(range(len(digits.test)))  # (360, 1, 8, 8), values 0 to 1

# %% [markdown]
# ## Look at the graph
#
# `return_graph=True` also returns the graph of every block. In `vig_digits` a node is a pixel, and
# each of the 64 nodes is connected to its 9 nearest nodes in feature space, itself among them.

# %%
image = images[3:4]
with torch.no_grad():
    logits, graphs = model(image, return_graph=True)
node = 20  # row 2, column 4
figure, axes = plt.subplots(1, len(graphs), figsize=(3 * len(graphs), 3.4), layout="constrained")
for number, (axis, graph) in enumerate(zip(axes, graphs.values(), strict=True)):
    axis.imshow(image[0, 0].numpy(), cmap="gray_r")
    row, column = divmod(node, 8)
    for neighbour in graph.neighbours[0, node].tolist():  # neighbours: (B, N, K)
        there, across = divmod(neighbour, 8)
        axis.plot([column, across], [row, there], "o-", color="tab:orange", markersize=4)
    axis.plot(column, row, "o", color="tab:blue", markersize=8)
    axis.set(title=f"block {number}", xticks=[], yticks=[])
figure.savefig(folder / "graph.png", dpi=100)
print(folder / "graph.png")

# %% [markdown]
# ## Predict

# %%
with torch.no_grad():
    predicted = model(images).argmax(1)
labels = torch.as_tensor(digits.test.labels)
print(f"{(predicted == labels).sum()} of {len(labels)} test images are right")
print("first ten: ", *predicted[:10].tolist())
print("they are:  ", *labels[:10].tolist())
