"""Count the steps of a run: its epochs, evaluations, and the items of each step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Course:
    """The steps of a run."""

    num_steps: int  # optimizer steps on a global batch
    steps_per_epoch: int  # that visit every training sample once
    evaluate_every: int  # epochs between evaluations; the last step always ends with one
    num_replicas: int  # D; a step has D items, one for each share of its batch

    def epoch(self, step: int) -> int:
        """Return the epoch, counted from 1, of a step, counted from 0."""
        return step // self.steps_per_epoch + 1

    def next_evaluation(self, step: int) -> int:
        """Return after how many steps the next evaluation is due, seen from step index `step`."""
        steps_between = self.evaluate_every * self.steps_per_epoch
        return min((step // steps_between + 1) * steps_between, self.num_steps)

    @property
    def num_items(self) -> int:
        return self.num_steps * self.num_replicas

    def steps_with(self, num_items: int) -> int:
        """Return to how many steps the first `num_items` items belong."""
        return -(-num_items // self.num_replicas)

    def items(self, first_step: int, end: int, share: int) -> range:
        """Return the items of one share, which is less than D, in steps first_step to end - 1."""
        num_shares = self.num_replicas
        return range(first_step * num_shares + share, end * num_shares, num_shares)
