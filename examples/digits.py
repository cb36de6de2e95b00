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
from vigpipe.data.sources import open_source

folder = Path(tempfile.mkdtemp()) / "digits"

# %% [markdown]
# ## Train
#
# The options are those of `vigpipe train`. The run has processes of its own, so that neither a
# script nor a notebook needs a main guard; with `stages=2` or `dp=2` it would start the ranks.

# %%
losses = []
run = vigpipe.train(epochs=3, out=folder, on_step=lambda row: losses.append(row["loss"]))
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")

# %% [markdown]
# ## Load the trained model
#
# The model is an ordinary PyTorch module.

# %%
model, transform, class_names = vigpipe.load(run.weights)
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

# %% [markdown]
# For image files, `transform` makes the model's input of one, and `vigpipe.predict` does all of it.

# %%
picture = folder / "four.png"
plt.imsave(picture, image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
(prediction,) = vigpipe.predict(run.weights, picture)
print(f"{picture.name} is a {prediction.names[0]} ({prediction.probabilities[0]:.0%})")
