"""Acting together: what one rank cannot do, no rank has done, and every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from data_pipeline.errors import UserError

Result = TypeVar("Result")


class Ranks:
    """All ranks of the run, talking in `group` (None: the one they started with). Every call is a collective.

    A thread that talks while another does needs a group of its own, or their messages are mixed up.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = group

    def gather(self, item: Any) -> list[Any]:
        """What each rank gave, by rank."""
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item, group=self._group)
        return items

    def on_all(self, failure: str, action: Callable[[], Result]) -> Result:
        """Do `action` on every rank. If it raises on any, all raise one message that begins with `failure`.

        Raises:
            UserError: all that went wrong are mistakes of the user, or of the file system.
            RuntimeError: something else went wrong.
        """
        try:
            result, complaint, cause = action(), None, None
        except Exception as error:
            user_can_mend = isinstance(error, UserError | OSError)
            complaint, cause = (user_can_mend, str(error) if user_can_mend else repr(error)), error
        complaints = [(rank, *told) for rank, told in enumerate(self.gather(complaint)) if told]
        if complaints:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, _, text in complaints)
            kind = UserError if all(user_can_mend for _, user_can_mend, _ in complaints) else RuntimeError
            raise kind(f"{failure}: {reasons}") from cause
        return result

    def on_main(self, failure: str, action: Callable[[], Result]) -> Result:
        """Do `action` on rank 0 and give all ranks its result."""
        result = self.on_all(failure, lambda: action() if self.rank == 0 else None)
        shared: Result = self.gather(result)[0]
        return shared

    def agree(self, action: Callable[[], Result]) -> list[Result]:
        """Do `action` everywhere and give all ranks every result. Where it raises UserError, all raise the first."""
        try:
            told: tuple[Any, str | None] = (action(), None)
        except UserError as error:
            told = (None, str(error))
        everyones = self.gather(told)
        for _, complaint in everyones:
            if complaint is not None:
                raise UserError(complaint)
        return [result for result, _ in everyones]
