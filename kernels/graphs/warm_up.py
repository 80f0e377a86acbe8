"""Number of eager calls before graphs are recorded."""

# number of earlier calls: they, and their backwards, compile kernels and find scales
WARM_UP = 2
# upper limit of the number, for functions whose graphs are dropped often
MAX_WARM_UP = 64
# number of replayed forwards after which recording has paid off
PAID_OFF = 16


class WarmUp:
    """The state of one function. If its graphs were dropped before they paid off, the number of eager calls
    before recording doubles."""

    def __init__(self):
        # number of consecutive calls of one kind before recording
        self.calls = WARM_UP
        # number of replays since the graphs were recorded
        self.replays = 0

    def dropped(self) -> None:
        """Call it when the function's graphs are dropped for calls of another kind."""
        self.calls = WARM_UP if self.replays >= PAID_OFF else min(2 * self.calls, MAX_WARM_UP)
        self.replays = 0
