"""What a run leaves on disk to be used, or gone on with, whatever the layout was.

A checkpoint is a folder; it is complete once it bears its name:

    <out>/checkpoints/step-00000050/
        manifest.json                   what it is of, and the size and SHA-256 of every file
        stage0-replica0.safetensors     tensors under the unsplit model's names
        stage0-replica1.safetensors     replicas hold the same, so each writes a share of it
        ...

    weights.py      trained weights alone: model.safetensors
    state.py        a rank's state as named tensors, and back
    manifest.py     the manifest, which is untrusted when it is read
    saver.py        write while training goes on; a name appears only on what is whole
    rescue.py       what replicas save when they lose a peer
    resume.py       choose a checkpoint, see that it is of this run, go on from it
    verbs.py        vigpipe checkpoint list|verify|export
"""
