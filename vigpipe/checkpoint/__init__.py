"""Save weights and checkpoints in a form that any layout can read.

A checkpoint is a folder; once the folder has its name, it is complete:

    <out>/checkpoints/step-00000050/
        manifest.json                   facts of the run, and size and SHA-256 of every file
        stage0-replica0.safetensors     tensors under the unsplit model's names
        stage0-replica1.safetensors     replicas are equal, so each writes a share of the tensors
        ...
"""
