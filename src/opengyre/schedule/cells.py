"""The scheduler's book of cells: counts by mode, so that an event costs no walk over all cells."""

from collections.abc import Iterable, Iterator

from opengyre.core.errors import InvariantError
from opengyre.core.events import Mode
from opengyre.schedule.state import CellState


class CellBook:
    """Cells that are not lost, with their modes.

    Args:
        cell_ids: Cells of the start, in rollout mode.

    >>> book = CellBook((0, 1))
    >>> book.turn(1, Mode.TRAINING)
    >>> book.training, book.joining, [cell.cell_id for cell in book.lightest(2)]
    (1, 1, [0])
    """

    def __init__(self, cell_ids: Iterable[int]) -> None:
        self._cells: dict[int, CellState] = {}
        self.training = 0
        """Cells in training mode or on the way to it."""
        self.joining = 0
        """Cells on the way to training."""
        self._movable: set[int] = set()
        self._asking: set[int] = set()
        for cell_id in cell_ids:
            self.join(cell_id)

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cells)

    def __contains__(self, cell_id: object) -> bool:
        return cell_id in self._cells

    def values(self) -> Iterable[CellState]:
        """Return all cells."""
        return self._cells.values()

    def get(self, cell_id: int) -> CellState | None:
        """Return a cell, None if it is lost."""
        return self._cells.get(cell_id)

    def cell(self, cell_id: int) -> CellState:
        """Return a cell.

        Raises:
            InvariantError: It is not in the run.
        """
        try:
            return self._cells[cell_id]
        except KeyError as error:
            raise InvariantError(f"cell {cell_id} is not in the run; live cells are {tuple(self._cells)}") from error

    def lightest(self, number: int) -> list[CellState]:
        """Return up to ``number`` cells that can leave rollout, fewest resident tokens first.

        Choice: the fewest tokens, since a switch costs their re-prefill.
        """
        if number <= 0:
            return []
        leaving = [self._cells[cell_id] for cell_id in self._movable]
        return sorted(leaving, key=lambda cell: (cell.kv_tokens, -cell.cell_id))[:number]

    def movable(self) -> list[int]:
        """Return the cells that are in rollout mode and stay there so far."""
        return sorted(self._movable)

    def idle_trainers(self) -> list[int]:
        """Return the cells in training mode that asked for work and got none."""
        return sorted(self._asking)

    @property
    def rollout(self) -> int:
        """Cells that are in rollout mode and stay there so far."""
        return len(self._movable)

    @property
    def returning(self) -> int:
        """Cells on the way to rollout."""
        return len(self._cells) - self.training - len(self._movable)

    @property
    def can_feed(self) -> bool:
        """Whether a trainer asks for work."""
        return bool(self._asking)

    def join(self, cell_id: int) -> None:
        """Take a cell in rollout mode into the book.

        Raises:
            InvariantError: It is there already.
        """
        if cell_id in self._cells:
            raise InvariantError(f"cell {cell_id} joined but is in the run")
        self._cells[cell_id] = CellState(cell_id)
        self._movable.add(cell_id)
        if len(self._cells) > 1 and cell_id < max(self._cells):
            self._cells = dict(sorted(self._cells.items()))

    def lose(self, cell_id: int) -> None:
        """Take a cell out of the book."""
        cell = self.cell(cell_id)
        self._count(cell, -1)
        self._movable.discard(cell_id)
        self._asking.discard(cell_id)
        del self._cells[cell_id]

    def _count(self, cell: CellState, sign: int) -> None:
        if cell.target is Mode.TRAINING:
            self.training += sign
            self.joining += sign * (cell.mode is not Mode.TRAINING)

    def turn(self, cell_id: int, mode: Mode) -> None:
        """Send a cell on its way to a mode."""
        cell = self.cell(cell_id)
        self._count(cell, -1)
        cell.target = mode
        cell.is_asking = False
        self._asking.discard(cell_id)
        self._movable.discard(cell_id)
        self._count(cell, 1)

    def arrive(self, cell_id: int, mode: Mode) -> None:
        """Note that a cell has reached the mode it was sent to.

        Raises:
            InvariantError: It was sent to another.
        """
        cell = self.cell(cell_id)
        if cell.target is not mode:
            raise InvariantError(f"cell {cell_id} arrived in {mode}, expected {cell.target}")
        self._count(cell, -1)
        cell.mode = mode
        cell.is_asking = False
        self._asking.discard(cell_id)
        self._count(cell, 1)
        if mode is Mode.ROLLOUT:
            self._movable.add(cell_id)

    def ask(self, cell_id: int) -> None:
        """Note that a cell in training mode asks for work.

        Raises:
            InvariantError: It is not in training mode, or has work.
        """
        cell = self.cell(cell_id)
        if cell.mode is not Mode.TRAINING or cell.running is not None:
            raise InvariantError(f"cell {cell_id} asks for work in mode {cell.mode}, running {cell.running}")
        cell.is_asking = True
        if cell.target is Mode.TRAINING:
            self._asking.add(cell_id)

    def run(self, cell_id: int, micro_step_id: str) -> None:
        """Note the micro-step that a cell was given."""
        cell = self.cell(cell_id)
        cell.is_asking, cell.running = False, micro_step_id
        self._asking.discard(cell_id)
