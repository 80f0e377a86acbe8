"""How long calls are launched before graphs are recorded."""

# calls before: they, and their backwards, compile kernels and find scales
WARM_UP = 2
# at most so many where graphs are dropped all the time
MOST_WARM_UP = 64
# forwards that graphs replayed when recording them has paid off
PAID_OFF = 16


class Patience:
    """Of one function. Where its graphs had not paid off when they were dropped, it waits twice as long."""

    def __init__(self):
        # calls of one kind that follow each other
        self.calls = WARM_UP
        # since there was no graph
        self.replays = 0

    def dropped(self) -> None:
        """Its graphs were dropped for calls of another kind."""
        self.calls = WARM_UP if self.replays >= PAID_OFF else min(2 * self.calls, MOST_WARM_UP)
        self.replays = 0
