"""Save weights and checkpoints in a form that any layout can read.

A checkpoint is a folder; once the folder has its name, it is complete:

    <out>/checkpoints/step-00000050/
        manifest.json                   facts of the run, and size and SHA-256 of every file
        stage0-replica0.safetensors     tensors under the unsplit model's names
        stage0-replica1.safetensors     replicas are equal, so each writes a share of the tensors
        ...

    weights_file.py  write and read trained weights alone: model.safetensors
    state.py         turn a rank's state into named tensors, and back
    manifest.py      write and check the manifest, which is untrusted when it is read
    saver.py         write checkpoints while training goes on
    checkpoints.py   the checkpoints of a run, as the training loop uses them
    rescue.py        save the state of replicas that lost a peer
    wide.py          put together the weights of a wide model from what sub-networks hold of it
    wide_run.py      write them at the end of a run
    resume.py        choose a checkpoint, check that it belongs to this run, and continue from it
"""
